"""Notes when marks are renewed, by Valkey's own clock:
a watcher that is late itself sees no late renewal."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor
from typing import Any, Self

from redis import Redis
from redis.exceptions import RedisError

from worker_runtime.protocol.errors import BerthError

#: Seconds after its time until a renewal counts as late.
LATE_TOLERANCE_S = 1.0


class RenewalWatchFailed(BerthError, code="WATCH_FAILED"):
    """The watch on the marks was interrupted: its figures would be wrong."""


@dataclass(frozen=True)
class RenewalReport:
    """Counts the renewals of one mark, within one window."""

    count: int
    late: int
    #: Longest time without a renewal, in seconds.
    max_gap: float


def judge_renewals(
    times: Sequence[float], began: float, ended: float, period: float
) -> RenewalReport:
    """Judges the renewals from `began` to `ended` (seconds of one clock), due every `period`
    seconds.

    Late is each renewal that was not there `LATE_TOLERANCE_S` after its time: a gap of more than
    period + tolerance has one late renewal, a gap of n periods + tolerance has n. The last one
    before the window sets the first time.
    """
    before = [at for at in times if at < began]
    within = [at for at in times if began <= at <= ended]
    points = [before[-1] if before else began, *within, ended]
    gaps = [later - earlier for earlier, later in pairwise(points)]
    late = sum(max(0, floor((gap - LATE_TOLERANCE_S) / period)) for gap in gaps)
    return RenewalReport(len(within), late, round(max(gaps), 3))


class RenewalWatch:
    """Follows `MONITOR` in a thread of its own. Use it as a context manager.

    `command`: what a script does to one of the marks when it renews it.
    """

    def __init__(self, url: str, marks: Sequence[str], command: str = "SET") -> None:
        self._url = url
        self._command = command
        self._times: dict[str, list[float]] = {mark: [] for mark in marks}
        self._ending = threading.Event()
        self._following = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="berth-watch")

    def __enter__(self) -> Self:
        self._client: Any = Redis.from_url(self._url, socket_timeout=10.0)
        self._thread.start()
        if not self._following.wait(10):
            raise RenewalWatchFailed("Valkey does not let us follow its commands")
        return self

    def __exit__(self, *failure: object) -> None:
        self._ending.set()
        self._client.ping()  # one more line for MONITOR, so that the thread looks up
        self._thread.join(10)
        self._client.close()

    def now(self) -> float:
        """Returns Valkey's time, in Unix seconds."""
        seconds, microseconds = self._client.time()
        return int(seconds) + int(microseconds) / 1e6

    def times(self, mark: str) -> list[float]:
        """Returns when this mark was set, Unix seconds. Raises `RenewalWatchFailed` if some may
        have been missed."""
        if not self._thread.is_alive():
            raise RenewalWatchFailed("the connection that follows Valkey's commands was lost")
        return list(self._times[mark])

    def _follow(self) -> None:
        # Without a timeout: there are seconds without any command.
        with (
            Redis.from_url(self._url, socket_timeout=None) as client,
            client.monitor() as monitor,
            contextlib.suppress(RedisError),  # `times` raises then
        ):
            self._following.set()
            for line in monitor.listen():
                if self._ending.is_set():
                    return
                words = line["command"].split(" ")
                # Done by a script (for marks: renew_mark.lua), which is what renews.
                if (
                    line["client_type"] == "lua"
                    and words[0] == self._command
                    and words[1] in self._times
                ):
                    self._times[words[1]].append(line["time"])
