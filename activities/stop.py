"""How an orchestrator is asked to stop: SIGTERM or SIGINT gracefully, a second one at once.

A graceful stop has a limit, too: while Temporal is away, its client waits for ever.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import structlog

log = structlog.get_logger()


def on_signals(cut_short: Callable[[], None], *, limit: float) -> asyncio.Event:
    """The event is set by the first signal. A second one, or `limit` seconds later the clock, calls
    `cut_short` and ends the process.

    What was in hand then is done again elsewhere, as after a crash: each activity is safe to run twice.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(number: signal.Signals, reason: str) -> None:
        log.warning("stopped_at_once", reason=reason)
        cut_short()
        os._exit(128 + number)  # no clean-up: that is what takes time

    def heard(number: signal.Signals) -> None:
        if stopping.is_set():
            end(number, f"a second signal, {number.name}")
        stopping.set()
        loop.call_later(limit, end, number, f"the stop took longer than {limit:.0f} s")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, heard, number)
    return stopping
