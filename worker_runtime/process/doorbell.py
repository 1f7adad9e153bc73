"""A bell: waits on one Valkey list beside other descriptors.

BLPOP is sent on a connection of its own and its reply is read when the selector says so. The server
answers every `BLOCK_SECONDS` seconds at the latest, so a connection that is silent for longer is dead.
"""

from __future__ import annotations

import selectors
import time

import hiredis

from worker_runtime.process.clock import Backoff
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import NOTHING, Valkey, ValkeyFailed

#: Seconds that one BLPOP blocks.
BLOCK_SECONDS = 20
#: Seconds past `BLOCK_SECONDS` after which the connection counts as dead.
_GRACE = 5.0


class Doorbell:
    """Elements of one list, as they come. After each `connected` the caller should look at the queue
    itself: an element that was popped while the connection broke is lost."""

    def __init__(self, client: Valkey, key: str, selector: selectors.BaseSelector, log: Log) -> None:
        self._client = client  # the bell's own
        self._key = key
        self._selector = selector
        self._log = log
        self._backoff = Backoff(0.05, 2.0)
        #: A BLPOP is under way.
        self._listening = False
        self._silent_after = 0.0
        self._registered: int | None = None

    def left(self) -> float:
        """Seconds until `run_due` has something to do."""
        if self._client.connected:
            return max(0.0, self._silent_after - time.monotonic()) if self._listening else 0.0
        return self._backoff.left()

    def run_due(self) -> bool:
        """Connects, and listens again, when that is due; true if it connected just now.

        After a ring it is to be called when what rang has been dealt with: sending the next BLPOP costs as
        much as half a round trip, and a ring meanwhile stays in the list.
        """
        if self._client.connected and self._listening:
            if time.monotonic() < self._silent_after:
                return False
            self._drop("silent")
        connected = self._client.connected
        if not connected and not self._backoff.due():
            return False
        try:
            self._client.connect()
            self._listen()
        except ValkeyFailed as error:
            self._drop(error.detail)
            return False
        if connected:
            return False
        self._registered = self._client.fileno()
        self._selector.register(self._registered, selectors.EVENT_READ, self)
        self._backoff.reset()
        return True

    def read_rings(self) -> list[bytes]:
        """What has arrived; to be called when the descriptor is readable. Then `run_due` is due."""
        try:
            reply = self._client.ready()
            if reply is NOTHING:
                return []
            if isinstance(reply, hiredis.ReplyError):
                self._drop(str(reply).split(" ", 1)[0])
                return []
        except ValkeyFailed as error:
            self._drop(error.detail)
            return []
        self._listening = False
        return [reply[1]] if reply else []

    def close(self) -> None:
        self._unregister()
        self._client.close()
        self._listening = False

    def _listen(self) -> None:
        self._client.send("BLPOP", self._key, BLOCK_SECONDS)
        self._listening = True
        self._silent_after = time.monotonic() + BLOCK_SECONDS + _GRACE

    def _drop(self, reason: str) -> None:
        self._log.warning("bell_lost", reason=reason)
        self.close()
        self._backoff.failed()

    def _unregister(self) -> None:
        # By number: the client has closed its socket already when it failed, and nothing else has been
        # opened since, so the number is still ours.
        if self._registered is not None:
            self._selector.unregister(self._registered)
            self._registered = None
