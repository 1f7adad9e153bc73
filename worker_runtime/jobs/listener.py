"""Waits for a ring or for mail: BLPOP on some lists, beside other descriptors, on a connection of its own.

Unlike `Doorbell` it waits only when asked to: a busy runner must not take the rings that wake idle ones.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence

import hiredis

from worker_runtime.process.clock import Backoff
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import NOTHING, Valkey, ValkeyFailed

#: Seconds that one BLPOP blocks, and past that after which the connection counts as dead.
_BLOCK = 20
_GRACE = 5.0


class QueueListener:
    """Calls `on_element` with each element that arrives.

    Calls `on_connect` after each new connection: elements may have been lost before it.
    """

    def __init__(
        self,
        client: Valkey,
        selector: selectors.BaseSelector,
        log: Log,
        on_element: Callable[[bytes], None],
        on_connect: Callable[[], None],
    ) -> None:
        """`client` is used by this listener alone."""
        self._client = client
        self._selector = selector
        self._log = log
        self._on_element = on_element
        self._on_connect = on_connect
        self._backoff = Backoff(0.05, 2.0)
        #: The lists that it waits on; empty while it does not wait.
        self._keys: tuple[str, ...] = ()
        self._silent_after = 0.0
        self._registered: int | None = None

    @property
    def waiting(self) -> bool:
        """Whether a BLPOP is under way, or will be once the connection is back."""
        return bool(self._keys)

    def seconds_until_due(self) -> float:
        """Seconds until `run_due` has something to do."""
        if not self._keys:
            return 3600.0
        if self._client.connected:
            return max(0.0, self._silent_after - time.monotonic())
        return self._backoff.left()

    def listen(self, keys: Sequence[str]) -> None:
        """Waits for one element of these lists, unless it waits already."""
        if not self._keys:
            self._keys = tuple(keys)
            if self._client.connected:
                self._send_blpop()
            else:
                self.run_due()

    def run_due(self) -> None:
        """Connects, if it should wait and has no live connection."""
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
        self._selector.register(self._registered, selectors.EVENT_READ, self._read_reply)
        self._backoff.reset()
        if self._send_blpop():
            self._on_connect()

    def close(self) -> None:
        """Stops waiting and closes the connection."""
        self._keys = ()
        self._disconnect()

    def _read_reply(self) -> None:
        try:
            reply = self._client.ready()
        except ValkeyFailed as error:
            self._drop(error.detail)
            return
        if reply is NOTHING:
            return
        if isinstance(reply, hiredis.ReplyError):
            self._drop(str(reply).split(" ", 1)[0])
        elif reply:
            self._keys = ()
            self._on_element(reply[1])
        else:  # nothing came for `_BLOCK` seconds
            self._send_blpop()

    def _send_blpop(self) -> bool:
        try:
            self._client.send("BLPOP", *self._keys, _BLOCK)
        except ValkeyFailed as error:
            self._drop(error.detail)
            return False
        self._silent_after = time.monotonic() + _BLOCK + _GRACE
        return True

    def _drop(self, reason: str) -> None:
        self._log.warning("job_bell_lost", reason=reason)
        self._disconnect()
        self._backoff.failed()

    def _disconnect(self) -> None:
        # By number: a client that failed has closed its socket already.
        if self._registered is not None:
            self._selector.unregister(self._registered)
            self._registered = None
        self._client.close()
