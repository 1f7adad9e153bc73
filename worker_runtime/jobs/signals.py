"""Signals as numbers on a pipe, so that the runner meets them in its selector and nowhere else."""

from __future__ import annotations

import contextlib
import os
import signal

_TAKEN = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


class SignalPipe:
    """SIGTERM, SIGINT and SIGCHLD of this process, from now on."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in _TAKEN:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TAKEN)

    def fileno(self) -> int:
        return self._reader

    def take(self) -> list[int]:
        """The numbers of the signals that have come."""
        numbers: list[int] = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reader, 4096):
                numbers += data
        return numbers
