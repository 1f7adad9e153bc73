"""Waits in BLPOP on some lists, beside other descriptors, on a connection of its own.

Unlike `Bell` it waits only when it is asked to: a busy runner must not take the rings of idle ones. A command
may be sent right behind the BLPOP: Valkey runs it once that returns, without a round trip between them.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import hiredis

from worker_runtime.process.clock import Backoff
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import NOTHING, Command, Valkey, ValkeyFailed

#: Seconds that one BLPOP blocks, and past that after which the connection counts as dead.
_BLOCK = 20
_GRACE = 5.0


class FollowUpCommand(Protocol):
    """What stands behind each BLPOP."""

    def command(self) -> Command | None:
        """Asked for at each BLPOP; None: nothing."""

    def answered(self, reply: Any) -> bool:
        """The reply of the command, which may be an error; true if the element needs no more attention."""

    def broken(self) -> None:
        """The connection is closed: no reply will come."""


class QueueListener:
    """`on_element` gets what came; b"" if nothing came, but a command stood behind. `on_connect` is called
    after each new connection, when things may have been missed."""

    def __init__(
        self,
        client: Valkey,
        selector: selectors.BaseSelector,
        log: Log,
        on_element: Callable[[bytes], None],
        on_connect: Callable[[], None],
        behind: FollowUpCommand | None = None,
    ) -> None:
        self._client = client  # the listener's own
        self._selector = selector
        self._log = log
        self._on_element = on_element
        self._on_connect = on_connect
        self._behind = behind
        #: How many replies make an answer, and those that have come.
        self._expected = 1
        self._replies: list[Any] = []
        self._backoff = Backoff(0.05, 2.0)
        self._keys: tuple[str, ...] = ()
        self._silent_after = 0.0
        self._registered: int | None = None

    @property
    def waiting(self) -> bool:
        """Whether a BLPOP is under way, or will be when the connection is back."""
        return bool(self._keys)

    def left(self) -> float:
        """Seconds until `run_due` has something to do."""
        if not self._keys:
            return 3600.0
        if self._client.connected:
            return max(0.0, self._silent_after - time.monotonic())
        return self._backoff.left()

    def listen(self, keys: Sequence[str]) -> None:
        """Waits for one element of these lists, unless it does already."""
        if not self._keys:
            self._keys = tuple(keys)
            if self._client.connected:
                self._wait()
            else:
                self.run_due()

    def run_due(self) -> None:
        """Connects when that is due."""
        if not self._keys:
            return
        if self._client.connected:
            if time.monotonic() < self._silent_after:
                return
            self._drop("silent")
        if not self._backoff.due():
            return
        try:
            self._client.connect()
        except ValkeyFailed as error:
            self._drop(error.detail)
            return
        self._registered = self._client.fileno()
        self._selector.register(self._registered, selectors.EVENT_READ, self._readable)
        self._backoff.reset()
        if self._wait():
            self._on_connect()

    def hear(self) -> None:
        """Takes what has come by now."""
        if self._keys and self._registered is not None:
            self._readable()

    def close(self) -> None:
        """Ends waiting and connection."""
        self._keys = ()
        self._disconnect()

    def _readable(self) -> None:
        try:
            while len(self._replies) < self._expected:
                reply = self._client.ready()
                if reply is NOTHING:
                    return
                self._replies.append(reply)
        except ValkeyFailed as error:
            self._drop(error.detail)
            return
        (reply, *behind), self._replies = self._replies, []
        if isinstance(reply, hiredis.ReplyError):
            self._drop(str(reply).split(" ", 1)[0])
            return
        if not reply and not behind:  # nothing for `_BLOCK` seconds
            self._wait()
            return
        self._keys = ()
        if behind and self._behind is not None and self._behind.answered(behind[0]):
            return
        self._on_element(reply[1] if reply else b"")

    def _wait(self) -> bool:
        behind = None if self._behind is None else self._behind.command()
        wait: Command = ("BLPOP", *self._keys, _BLOCK)
        try:
            self._client.send_all([wait] if behind is None else [wait, behind])
        except ValkeyFailed as error:
            self._drop(error.detail)
            return False
        self._expected = 1 if behind is None else 2
        self._silent_after = time.monotonic() + _BLOCK + _GRACE
        return True

    def _drop(self, reason: str) -> None:
        self._log.warning("job_bell_lost", reason=reason)
        self._disconnect()
        self._backoff.failed()

    def _disconnect(self) -> None:
        # By number, as in `Bell`: the client may have closed its socket already.
        if self._registered is not None:
            self._selector.unregister(self._registered)
            self._registered = None
        self._replies.clear()
        self._client.close()
        if self._behind is not None:
            self._behind.broken()
