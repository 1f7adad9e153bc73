"""Being told when the server begins to stop.

uvicorn waits for the answers under way before it tells the application (lifespan) that it stops, and an
open event stream would let it wait until its patience ends. So the streams must hear of the signal itself.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import uvicorn


@contextmanager
def on_stop(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` in the event loop when uvicorn gets SIGTERM or SIGINT; uvicorn then does what it does.

    Does nothing where no uvicorn handles signals, as in tests.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                _chain(stack, number, tell)
        yield


def _chain(stack: ExitStack, number: signal.Signals, tell: Callable[[], None]) -> None:
    before = signal.getsignal(number)
    if not callable(before) or not isinstance(getattr(before, "__self__", None), uvicorn.Server):
        return
    loop = asyncio.get_running_loop()

    def handle(given: int, frame: FrameType | None) -> None:
        before(given, frame)
        loop.call_soon_threadsafe(tell)

    signal.signal(number, handle)
    stack.callback(signal.signal, number, before)
