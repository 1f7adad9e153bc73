"""Waiting for a call of a broker SDK no longer than its caller can afford."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TookTooLong(Exception):
    """The call has not returned in time. It goes on by itself; nobody knows how it ends."""


class _Call(Generic[T]):
    def __init__(self, work: Callable[[], T], late: Callable[[T], None]) -> None:
        self._work = work
        self._late = late
        self._lock = threading.Lock()
        self._abandoned = False
        self.done = threading.Event()
        self.result: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            result = self._work()
        except BaseException as error:  # handed to the waiting thread; without one there is nobody to tell
            self.error = error
            self.done.set()
            return
        with self._lock:
            self.result.append(result)
            abandoned = self._abandoned
            self.done.set()
        if abandoned:
            self._late(result)

    def abandon(self) -> bool:
        """False if the call has just ended after all."""
        with self._lock:
            self._abandoned = not self.done.is_set()
            return self._abandoned


def within(seconds: float, work: Callable[[], T], late: Callable[[T], None]) -> T:
    """Runs `work` in a thread of its own and returns its result, or raises its error.

    Raises `TookTooLong` after `seconds`; a result that comes later is given to `late`, in that thread.
    SDKs have calls without a timeout (Shioaji's constructor and login), and none keeps its own to the point.
    """
    call = _Call(work, late)
    threading.Thread(target=call.run, name="broker-call", daemon=True).start()
    if not call.done.wait(max(0.0, seconds)) and call.abandon():
        raise TookTooLong(f"no answer within {seconds:.1f} s")
    if call.error is not None:
        raise call.error
    return call.result[0]
