"""The channels on which workers answer one API process: one a user, whose name no other worker can guess.

A worker may publish what it likes, but it knows its own user's channel only. A channel that brings more than
anybody waits for is left for a while. Its user's answers are found by their keys then, up to a second later
(`AnswerWaiter`); nobody else's are held up.
"""

import os
import secrets
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

import structlog

from infra.valkey.link import ValkeyLink
from worker_runtime.protocol import keys

#: Users whose channels are listened to; the one that asked for nothing for the longest time goes first.
MOST_CHANNELS = 10_000
#: KiB that nobody awaited, each message counting as one more, in so many seconds, beyond which a channel is
#: left, and seconds for which it is. A repeated answer, or one that is too late, takes less than one.
MOST_UNAWAITED, WINDOW, LEFT_FOR = 1000, 60.0, 600.0


@dataclass(eq=False, slots=True)
class _Channel:
    user_id: str
    name: str
    #: The connection that is subscribed to it; None: none is.
    link: ValkeyLink | None = None
    unawaited: float = 0.0
    #: Instants on `time.monotonic`.
    counted_since: float = 0.0
    left_until: float = 0.0


class AnswerChannels:
    """Of one process. Only its event loop may call."""

    def __init__(self) -> None:
        self._prefix = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._secret = secrets.token_bytes(32)
        self._by_user: OrderedDict[str, _Channel] = OrderedDict()
        self._by_name: dict[bytes, _Channel] = {}
        self._log = structlog.get_logger()

    def name_of(self, user_id: str) -> str:
        known = self._by_user.get(user_id)
        if known is not None:
            return known.name
        tag = blake2b(user_id.encode(), key=self._secret, digest_size=16).hexdigest()
        return keys.answers(f"{self._prefix}:{tag}")

    def listen(self, user_id: str, link: ValkeyLink | None) -> None:
        """Subscribes to the user's channel, ahead of all that is sent on this connection from now on."""
        channel = self._by_user.get(user_id)
        if channel is None:
            channel = _Channel(user_id, self.name_of(user_id))
            self._by_user[user_id] = self._by_name[channel.name.encode()] = channel
            if len(self._by_user) > MOST_CHANNELS:
                _, oldest = self._by_user.popitem(last=False)
                del self._by_name[oldest.name.encode()]
                self._unsubscribe(oldest)
        self._by_user.move_to_end(user_id)
        if link is not None and channel.link is not link and time.monotonic() >= channel.left_until:
            channel.link = link
            link.subscribe(channel.name)

    def is_open(self, name: bytes) -> bool:
        """Whether a message of this channel counts: not what was on its way when it was left."""
        channel = self._by_name.get(name)
        return channel is not None and channel.link is not None

    def count_unawaited(self, name: bytes, size: int) -> None:
        """Counts a message of `size` bytes that nobody awaits; leaves its channel if these are too many."""
        channel, now = self._by_name[name], time.monotonic()
        if now - channel.counted_since > WINDOW:
            channel.counted_since, channel.unawaited = now, 0.0
        channel.unawaited += 1 + size / 1024
        if channel.unawaited > MOST_UNAWAITED:
            channel.left_until, channel.unawaited = now + LEFT_FOR, 0.0
            self._unsubscribe(channel)
            self._log.error("answers_flooded", user_id=channel.user_id, left_for=LEFT_FOR)

    @staticmethod
    def _unsubscribe(channel: _Channel) -> None:
        link, channel.link = channel.link, None
        if link is not None:
            link.unsubscribe(channel.name)
