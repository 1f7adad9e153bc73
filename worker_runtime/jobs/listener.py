"""Waits for a ring or for mail, when asked to: a busy runner must not take the rings of idle ones."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence

from worker_runtime.process.doorbell import Doorbell
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import Valkey


class QueueListener(Doorbell):
    """A doorbell that is heard once for each `listen`.

    Calls `on_element` with the element that arrives. Calls `on_connect` after each new connection: an element
    may have been lost before it.
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
        super().__init__(client, (), selector, log)
        self._on_element = on_element
        self._on_connect = on_connect

    def __call__(self) -> None:
        """Reads what has arrived; the runner's loop calls this when the connection is readable."""
        for element in self.read_rings():
            self._keys = ()
            self._on_element(element)

    def seconds_until_due(self) -> float:
        """Seconds until `run_due` has something to do."""
        return self.left() if self._keys else 3600.0

    def listen(self, keys: Sequence[str]) -> None:
        """Waits for one element of these lists, unless it waits already."""
        if not self._keys:
            self._keys = tuple(keys)
            self.run_due()

    def run_due(self) -> bool:
        """Connects, if it should wait and has no live connection; true if it has connected."""
        connected = bool(self._keys) and super().run_due()
        if connected:
            self._on_connect()
        return connected

    def stop(self) -> None:
        """Stops waiting and closes the connection."""
        self._keys = ()
        self.close()
