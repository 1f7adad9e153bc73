"""Decides how many runners a fleet needs, by how long its jobs wait, and keeps that many on this
host."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import structlog
from redis.exceptions import RedisError

from infra.jobs.fleet import fleet_tag
from infra.jobs.view import JobInspector
from infra.processes import end_with_parent
from infra.settings import Settings
from worker_runtime.protocol.launch import ExitCode

#: Seconds between two looks at the queues.
CHECK_INTERVAL_S = 2.0
#: The event that says once in `REPORT_INTERVAL_S` seconds how long the oldest job has waited: on
#: AWS a fleet gets more tasks by it (`infra/aws/servers.py`).
WAITED_EVENT, REPORT_INTERVAL_S = "jobs_waited", 60.0
#: Without a waiting job for so many times `jobs_wait`, there is one runner less.
CALM_FACTOR = 12

log = structlog.get_logger()


def wanted_runners(runners: int, waited: float, target: float) -> int:
    """Returns the number of runners for a queue whose oldest job has waited so long (seconds).

    As many times more as that is over the target,
    at most twice as many: a new one has to show its effect.
    """
    return math.ceil(runners * min(2.0, max(1.0, waited / target)))


class ScaledFleet:
    """Runners of one configuration, between two bounds (`jobs_runners`).

    Each is a process of its own, and ends with this one.
    One that dies is replaced at the next look.
    """

    def __init__(self, settings: Settings, config: bytes) -> None:
        self._settings = settings
        self._config = config
        self.least, self.most = settings.runner_bounds
        self._runners: list[subprocess.Popen[bytes]] = []
        #: Those that were asked to end.
        self._leaving: list[subprocess.Popen[bytes]] = []
        self._busy_at = time.monotonic()
        self._told_at = -REPORT_INTERVAL_S
        self._signals = 0
        self._stop = threading.Event()

    def run(self) -> int:
        """Runs until SIGTERM or SIGINT, which the runners get, too; a second one kills their jobs.

        Returns the exit code: not 0 when the configuration is bad.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        with JobInspector(self._settings.valkey_url, fleet_tag(self._settings)) as jobs:
            while not self._stop.wait(CHECK_INTERVAL_S if self._runners else 0.0):
                if any(runner.poll() == ExitCode.BAD_CONFIG for runner in self._runners):
                    return ExitCode.BAD_CONFIG
                self._adjust(self._wanted(jobs))
        passed = 0
        while alive := [
            runner for runner in (*self._runners, *self._leaving) if runner.poll() is None
        ]:
            if passed < self._signals:
                passed += 1
                for runner in alive:
                    if passed > 1 or runner in self._runners:
                        runner.terminate()
            time.sleep(0.05)
        return ExitCode.OK

    def _note_signal(self, number: int, _frame: object) -> None:
        self._signals += 1
        self._stop.set()

    def _wanted(self, jobs: JobInspector) -> int:
        now = max(len(self._runners), self.least)
        try:
            # Of each user the next job only: to read ten of each took Valkey 60 ms in a flood of
            # 2,000 users, and orders waited; one takes 6.
            waits = jobs.waits(1)
        except (RedisError, OSError) as error:
            log.warning("job_waits_unknown", reason=type(error).__name__)
            return now
        queues = self._settings.jobs_queues
        waited = max((waits[queue] for queue in waits if {"*", queue} & set(queues)), default=None)
        if time.monotonic() > self._told_at + REPORT_INTERVAL_S:
            self._told_at = time.monotonic()
            log.info(WAITED_EVENT, queues=queues, seconds=waited or 0.0, runners=now)
        if waited is not None:
            self._busy_at = time.monotonic()
            return min(self.most, wanted_runners(now, waited, self._settings.jobs_wait))
        if (
            now > self.least
            and time.monotonic() > self._busy_at + CALM_FACTOR * self._settings.jobs_wait
        ):
            self._busy_at = time.monotonic()
            return now - 1
        return now

    def _adjust(self, target: int) -> None:
        before = len(self._runners)
        self._runners = [runner for runner in self._runners if runner.poll() is None]
        self._leaving = [runner for runner in self._leaving if runner.poll() is None]
        while len(self._runners) < target:
            self._runners.append(self._start())
        while len(self._runners) > target:
            self._leaving.append(self._runners.pop())
            self._leaving[-1].terminate()
        if len(self._runners) != before:
            log.info(
                "job_fleet_scaled", queues=self._settings.jobs_queues, before=before, runners=target
            )

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "worker_runtime.jobs"]
        runner = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=end_with_parent(os.getpid()),
        )
        assert runner.stdin is not None  # noqa: S101 - a pipe was asked for
        with suppress(OSError), runner.stdin:
            runner.stdin.write(self._config)
        return runner
