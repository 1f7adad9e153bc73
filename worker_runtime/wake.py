"""A pipe that wakes a selector: from SIGTERM, or from a thread of a broker's SDK."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable


class WakePipe:
    """`set` may be called from any thread and any number of times; one `clear` takes all of them."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._reader

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake up anyway
            os.write(self._writer, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def on_sigterm(self, stop: Callable[[], None]) -> None:
        """Has SIGTERM call `stop` and wake the selector. It was blocked since the fork: none is missed."""
        signal.signal(signal.SIGTERM, lambda *_: stop())
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
