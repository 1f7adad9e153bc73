"""Message authentication: who may have written what stands in Valkey.

Each message carries keyed BLAKE2b MACs, one for each version of the message secret that its author
holds, as `2.base64,1.base64`. So a reader that knows only the present or only the former version
can check it, and the secret is rotated without a restart. Each covers the list of versions, and all
that a reader holds have to fit: only one text counts for a message. The first part of what is
signed names the use (`b"request/1"`), so that no MAC counts for another use; each part has its
length in front, so that no two lists of parts are alike.

A MAC takes about 1 µs.
"""

import hmac
import time
from binascii import b2a_base64
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

from worker_runtime.protocol.errors import InvalidSignature, NewerKeyNeeded

#: Bytes of a MAC, and of each key.
MAC_BYTES = 16
KEY_BYTES = 32
#: Characters; a longer text is refused unread. Two versions take about 55.
MAX_MAC_LENGTH = 256
#: Senders that are logged in a minute: a hostile one may have many names.
_MAX_LOGGED_SENDERS = 100
#: Stands for the account in the seal of `AssignmentKeys`; account ids begin with a letter or digit.
KEYS_ACCOUNT = "*keys"


class MessageKey(msgspec.Struct, frozen=True, array_like=True):
    """A key derived from one version of the message secret."""

    version: int
    key: bytes

    def __repr__(self) -> str:
        return f"MessageKey({self.version}, …)"


#: Newest first.
MessageKeys = Sequence[MessageKey]


class AssignmentKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that a worker gets, sealed, for an assignment. Each list is newest first.

    An assignment gives one worker to one user under one epoch, from the claim to the worker's end.
    """

    #: The user's, in every epoch: checks requests and the switch,
    #: and signs requests of the user's own jobs.
    request: tuple[MessageKey, ...]
    #: The keys of this epoch: they sign whatever the worker writes.
    assignment: tuple[MessageKey, ...]

    def __repr__(self) -> str:
        return "AssignmentKeys(…)"


def join_parts(parts: Sequence[bytes]) -> bytes:
    """Joins the parts, each with its length in front."""
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])


def sign(keys: MessageKeys, *parts: bytes) -> str:
    """Returns one MAC for each key."""
    data = join_parts([",".join([str(key.version) for key in keys]).encode(), *parts])
    return ",".join([f"{key.version}.{_mac(key.key, data).decode('ascii')}" for key in keys])


def verify(keys: MessageKeys, mac: str, *parts: bytes) -> bool:
    """Returns True if the MACs of all known versions, and of at least one, were made with these
    keys over these parts. Takes constant time for each key."""
    if not mac or len(mac) > MAX_MAC_LENGTH or not mac.isascii():
        return False
    pairs = [pair.partition(".") for pair in mac.split(",")]
    given = {version: text for version, _, text in pairs}
    data = join_parts([",".join([version for version, _, _ in pairs]).encode(), *parts])
    held = [
        hmac.compare_digest(given[str(key.version)].encode("ascii"), _mac(key.key, data))
        for key in keys
        if str(key.version) in given
    ]
    return bool(held) and all(held)


def sign_payload(keys: MessageKeys, use: bytes, payload: bytes) -> bytes:
    """Returns the MAC, a space, the payload."""
    return b"%s %s" % (sign(keys, use, payload).encode(), payload)


def read_payload(keys: MessageKeys, use: bytes, entry: bytes, subject: str) -> bytes:
    """Returns the payload of `sign_payload`. Raises `InvalidSignature` if nobody with these keys
    signed it, and `NewerKeyNeeded` if that is not known yet, both with `subject` as the reason."""
    head, _, payload = entry.partition(b" ")
    mac = head.decode("ascii", "replace")
    if not verify(keys, mac, use, payload):
        raise (NewerKeyNeeded if names_newer_key(keys, mac) else InvalidSignature)(subject)
    return payload


def names_newer_key(keys: MessageKeys, mac: str) -> bool:
    """Returns True if the MAC names only versions that are newer than these keys: anybody can write
    that."""
    if len(mac) > MAX_MAC_LENGTH:
        return False
    named = [pair.split(".", 1)[0] for pair in mac.split(",")]
    if not all(version.isascii() and version.isdigit() for version in named):
        return False
    return min(int(version) for version in named) > max((key.version for key in keys), default=0)


def derive_key(secret: bytes, *parts: bytes) -> bytes:
    """Derives a key for one purpose, from a secret or key of `KEY_BYTES` bytes."""
    return blake2b(join_parts(parts), key=secret, digest_size=KEY_BYTES).digest()


class RefusalCounter:
    """Counts refused messages, and says which are worth
    a line in the log: one a sender and minute."""

    def __init__(self, on_refusal: Callable[[], object] | None = None) -> None:
        self.count = 0
        self._on_refusal = on_refusal
        self._logged: set[str] = set()
        self._since = time.monotonic()

    def add(self, sender: str) -> bool:
        """Counts one of this sender; whether to log it."""
        self.count += 1
        if self._on_refusal is not None:
            self._on_refusal()
        if time.monotonic() - self._since > 60.0:
            self._logged.clear()
            self._since = time.monotonic()
        if sender in self._logged or len(self._logged) >= _MAX_LOGGED_SENDERS:
            return False
        self._logged.add(sender)
        return True


def _mac(key: bytes, data: bytes) -> bytes:
    return b2a_base64(blake2b(data, key=key, digest_size=MAC_BYTES).digest(), newline=False)
