"""Signs and reads what a worker says of itself and of its orders: events, and the metadata next to
its mark.

They carry MACs under the keys of the worker's assignment, which only that worker has besides the
services. So nobody else can tell of a user's orders, and a worker only of its own user's.

Metadata also say until when they count, by Valkey's clock, so that nobody can show an older state
again. The mark itself stays a plain sign of life: whoever can write to Valkey can delete it anyway.
What decides more than that somebody may be alive reads the metadata.
"""

from collections.abc import Callable, Mapping

import msgspec

from worker_runtime.protocol import bounds
from worker_runtime.protocol.authentication import (
    MessageKeys,
    read_payload,
    sign,
    sign_payload,
    verify,
)
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.messages import Event, decode, encode

#: The field of an entry of the stream `worker:events`.
EVENT = "e"
#: Fields of the metadata.
METADATA_MAC, VALID_UNTIL = "mac", "valid_until_ms"

_EVENT_USE, _METADATA_USE = b"event/1", b"metadata/1"

#: The assignment keys of a user and epoch.
KeysOfAssignment = Callable[[str, int], MessageKeys]


def sign_event(event: Event, keys: MessageKeys) -> bytes:
    """Returns an entry of the worker's list of events: its MAC, a space, the event."""
    return sign_payload(keys, _EVENT_USE, encode(event))


class EventSender(msgspec.Struct, frozen=True, kw_only=True):
    """Whose event it is, as far as the event says."""

    user_id: bounds.Id = ""
    epoch: bounds.Counter = 0
    worker_id: bounds.LongId = ""


def read_sender(payload: bytes) -> EventSender:
    """Returns the sender that an event names, also if the rest of it cannot be read; else one
    without a name."""
    try:
        sender: EventSender = decode(payload, EventSender)
    except MalformedMessage:
        return EventSender()
    return sender


def payload_of(entry: bytes) -> bytes:
    """Returns the event of an entry, as it was sent."""
    return entry.partition(b" ")[2]


def read_event(entry: bytes, keys_of: KeysOfAssignment) -> Event:
    """Returns the event of an entry.

    Raises `InvalidSignature` if it is not from the worker of its user and epoch, `NewerKeyNeeded`
    if that cannot be told yet, and `MalformedMessage` if that worker sent what cannot be read.
    """
    sender = read_sender(payload_of(entry))
    keys, author = (
        keys_of(sender.user_id, sender.epoch),
        f"user {sender.user_id}, epoch {sender.epoch}",
    )
    event: Event = decode(read_payload(keys, _EVENT_USE, entry, f"event of {author}"), Event)
    return event


def sign_metadata(
    fields: Mapping[str, str | int], user_id: str, keys: MessageKeys
) -> dict[str, str | int]:
    """Returns the fields with their MAC; `VALID_UNTIL` must be one of them."""
    parts = _metadata_parts({name: str(value) for name, value in fields.items()}, user_id)
    return {**fields, METADATA_MAC: sign(keys, *parts)}


def read_metadata(
    fields: Mapping[bytes, bytes],
    mark: bytes | None,
    user_id: str,
    now_ms: int,
    keys_of: KeysOfAssignment,
) -> dict[str, str]:
    """Returns the user's metadata, if the worker of this mark wrote them and they still count; else
    nothing.

    `now_ms` is Valkey's time.
    """
    decoded = {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in fields.items()
    }
    mac, until, epoch = (
        decoded.pop(METADATA_MAC, ""),
        decoded.get(VALID_UNTIL, ""),
        decoded.get("epoch", ""),
    )
    if not (_is_number(until) and int(until) >= now_ms and _is_number(epoch)):
        return {}
    if (mark or b"").decode("utf-8", "replace") != f"{epoch}:{decoded.get('worker', '')}":
        return {}
    authentic = verify(keys_of(user_id, int(epoch)), mac, *_metadata_parts(decoded, user_id))
    return decoded if authentic else {}


def _metadata_parts(fields: Mapping[str, str], user_id: str) -> list[bytes]:
    words = [word for field in sorted(fields.items()) for word in field]
    return [_METADATA_USE, user_id.encode(), *(word.encode() for word in words)]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18
