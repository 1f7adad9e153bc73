"""Collects the errors that a process logs,
and sends them to the stream `berth:errors` for operators.

While Valkey is away they are counted on;
what a process has not sent when it dies is in its log only.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from worker_runtime.jobs.protocol.telemetry import MAX_ERRORS, error_report
from worker_runtime.protocol import keys

if TYPE_CHECKING:
    from redis.asyncio import Redis

#: Seconds between two sendings.
SEND_INTERVAL_S = 1.0
#: Errors that wait in a process; further ones are dropped.
MAX_WAITING_ERRORS = 100
#: Methods of a logger whose lines are errors.
ERRORS = frozenset({"error", "exception", "critical", "fatal"})
#: The form of our own events. Lines of libraries may hold anything.
_EVENT = re.compile(r"[a-z][a-z0-9_.]{0,63}")


class ErrorCollector:
    """Counts errors as they are logged. Never waits: among threads, it may miss a few."""

    def __init__(self) -> None:
        self.service = ""
        self._found: Counter[tuple[str, str]] = Counter()

    def collect(self, values: Any) -> None:
        """Collects an error; `values` are the fields of a log line."""
        self.put({self._report(values): 1})

    def _report(self, values: Any) -> tuple[str, str]:
        record = values.get("_record")  # of the standard `logging`
        event = str(values.get("event") if record is None else record.msg)
        if not _EVENT.fullmatch(event):
            event = "error" if record is None else record.name
        error = values.get("exc_info") if record is None else record.exc_info
        if not isinstance(error, BaseException):
            error = error[1] if isinstance(error, tuple) else sys.exc_info()[1] if error else None
        if error is not None:
            values = {**values, "error": type(error).__name__, "where": _place(error)}
        return error_report(self.service, event, values)

    def put(self, counts: dict[tuple[str, str], int]) -> None:
        for report, count in counts.items():
            if report in self._found or len(self._found) < MAX_WAITING_ERRORS:
                self._found[report] += count

    def take(self) -> dict[tuple[str, str], int]:
        """Takes what was found since the last time: how often each key and sentence."""
        counts, self._found = self._found, Counter()
        return counts


def _place(error: BaseException) -> str:
    """Returns where the error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (
        f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else ""
    )


#: The collector of this process. `configure_log` has it see each line.
collector = ErrorCollector()


async def send_errors(client: Redis, service: str) -> None:
    """Sends the collected errors in a background loop."""
    from redis.exceptions import RedisError  # a node has no use for the library

    collector.service = service
    while True:
        counts = collector.take()
        try:
            for report in list(counts):
                key, text = report
                entry: dict[Any, Any] = {"key": key, "text": text, "count": counts[report]}
                await client.xadd(keys.ERRORS, entry, maxlen=MAX_ERRORS)
                del counts[report]
        except (RedisError, OSError):  # not logged: that would be another error to send
            collector.put(counts)
        await asyncio.sleep(SEND_INTERVAL_S)
