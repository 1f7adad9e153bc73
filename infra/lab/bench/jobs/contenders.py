"""The contenders: our runner, RQ and huey behind one interface."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import msgspec
from redis import Redis

from infra.lab.bench.jobs import peers, tasks
from infra.lab.loadtest_job import KEYS, KEYS_IN_JSON
from infra.local.process import ServerFailed
from infra.processes import end_with_parent
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.messages import Job

#: Name of our job (`infra.lab.loadtest_job`).
LOADTEST = "loadtest"
_PIPELINE = 500


class Contender(Protocol):
    """One way to run jobs. `busy`: seconds of CPU; `stamp`: a socket that gets the time of the
    start."""

    #: Its key in the result.
    name: str

    def commands(self, runners: int) -> list[tuple[Sequence[str], bytes]]:
        """The processes: argument list and standard input."""

    def fill(self, count: int, busy: float) -> None:
        """Enqueues `count` jobs."""

    def enqueue(self, stamp: str) -> None:
        """Enqueues one job in the simplest way."""

    def count_waiting_jobs(self) -> int:
        """The number of jobs that no runner has taken yet."""


class OurRunner:
    """`python -m infra.lab.loadtest_job`, one process a runner. `recycle`: jobs that a child
    runs."""

    def __init__(
        self, name: str, client: Redis, url: str, recycle: int, *, lease: float = 5.0
    ) -> None:
        """`lease` in seconds."""
        self.name = name
        self._client: Any = client
        self._url = url
        self._settings = {"recycle": recycle, "lease": lease}

    def commands(self, runners: int) -> list[tuple[Sequence[str], bytes]]:
        return [(runner_command(), self._config(number)) for number in range(runners)]

    def _config(self, number: int) -> bytes:
        return runner_config(f"{self.name}-{number}", self._url, **self._settings)

    def load_script(self) -> None:
        """Lets `enqueue` and `put` name the script by its digest."""
        self._client.script_load(job_scripts.ENQUEUE.source)

    def fill(self, count: int, busy: float) -> None:
        self.load_script()
        for first in range(0, count, _PIPELINE):
            pipeline = self._client.pipeline(transaction=False)
            for _ in range(min(_PIPELINE, count - first)):
                call = job_calls.enqueue(new_job(busy=busy), KEYS)
                pipeline.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
            pipeline.execute()

    def enqueue(self, stamp: str) -> None:
        self.put({"stamp": stamp})

    def put(self, arguments: dict[str, Any]) -> None:
        call = job_calls.enqueue(new_job(**arguments), KEYS)
        self._client.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)

    def count_waiting_jobs(self) -> int:
        return int(self._client.zcard(job_keys.subqueue(job_keys.FLEET_TAG, "default", LOADTEST)))


class RqContender:
    """RQ's `Worker`, which forks for each job, or `SimpleWorker`, which runs it in its own
    process."""

    def __init__(self, name: str, client: Redis, url: str, kind: str) -> None:
        from rq import Queue

        self.name = name
        self._client: Any = client
        self._url = url
        self._kind = kind
        self._queue = Queue(peers.QUEUE, connection=client)

    def commands(self, runners: int) -> list[tuple[Sequence[str], bytes]]:
        return [(_peer(self._kind, self._url, 1), b"")] * runners

    def fill(self, count: int, busy: float) -> None:
        from rq import Queue

        for first in range(0, count, _PIPELINE):
            jobs = range(min(_PIPELINE, count - first))
            self._queue.enqueue_many([Queue.prepare_data(tasks.perform, [busy]) for _ in jobs])

    def enqueue(self, stamp: str) -> None:
        self._queue.enqueue(tasks.perform, 0.0, stamp)

    def count_waiting_jobs(self) -> int:
        return int(self._client.llen(f"rq:queue:{peers.QUEUE}"))


class HueyContender:
    """huey's consumer with processes as workers. It loses the jobs of a killed worker."""

    def __init__(self, name: str, client: Redis, url: str) -> None:
        self.name = name
        self._url = url
        self._huey, self._task = peers.huey_task(url)

    def commands(self, runners: int) -> list[tuple[Sequence[str], bytes]]:
        return [(_peer("huey", self._url, runners), b"")]

    def fill(self, count: int, busy: float) -> None:
        for _ in range(count):
            self._task(busy)

    def enqueue(self, stamp: str) -> None:
        self._task(0.0, stamp)

    def count_waiting_jobs(self) -> int:
        return int(self._huey.pending_count())


class ContenderProcesses:
    """The processes of one contender, each in a session of its own; the block ends them."""

    def __init__(self, contender: Contender, runners: int, log: Path) -> None:
        self._running = []
        # Their logs go to a file: events are written in every figure.
        with log.open("ab") as out:
            for command, text in contender.commands(runners):
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    preexec_fn=end_with_parent(os.getpid()),
                )
                self._running.append(process)
                assert process.stdin is not None  # noqa: S101 — a pipe was asked for
                process.stdin.write(text)
                process.stdin.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._running]

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self._running)

    def __enter__(self) -> ContenderProcesses:
        return self

    def __exit__(self, *failure: object) -> None:
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def new_job(**arguments: Any) -> Job:
    """One of our jobs, with a random id, as producers make them."""
    # An id need not be secret, only unique.
    job_id = f"{random.getrandbits(64):016x}"
    return Job(
        job_id=job_id,
        name=LOADTEST,
        idempotent=True,
        args=msgspec.Raw(msgspec.json.encode(arguments)),
    )


def runner_command(module: str = "infra.lab.loadtest_job") -> list[str]:
    return [sys.executable, "-P", "-m", module]


def runner_config(name: str, url: str, **settings: Any) -> bytes:
    """The configuration of one of our runners."""
    return json.dumps(
        {"name": name, "valkey_url": url, "message_keys": KEYS_IN_JSON, **settings}
    ).encode()


def _peer(kind: str, url: str, workers: int) -> list[str]:
    return [sys.executable, "-P", "-m", peers.__name__, kind, url, str(workers)]


def contenders(client: Redis, url: str) -> list[Contender]:
    """All, in the order of the table. Raises `ServerFailed` when a peer is not installed."""
    missing = [name for name in ("rq", "huey") if find_spec(name) is None]
    if missing:
        raise ServerFailed(f"{' and '.join(missing)} must be installed: the extra `bench` has them")
    return [
        OurRunner("fresh", client, url, recycle=1),
        OurRunner("recycled", client, url, recycle=100),
        RqContender("rq", client, url, kind="worker"),
        RqContender("rq_simple", client, url, kind="simple"),
        HueyContender("huey", client, url),
    ]
