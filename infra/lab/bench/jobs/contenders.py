"""The contenders: our runner and its peers behind one interface."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol, cast

import msgspec
from redis import Redis

from infra.lab.bench.jobs.peer_environment import ROOT
from infra.lab.loadtest_job import KEYS, KEYS_IN_JSON
from infra.local.process import ServerFailed
from infra.processes import end_with_parent
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.messages import Job

#: Name of our job (`infra.lab.loadtest_job`).
LOADTEST = "loadtest"
_JOBS_PER_PIPELINE = 500
#: Not imported here: our environment does not have what it imports.
PEER_MODULE = "infra.lab.bench.jobs.rate_peers"
#: Peers that the extra `bench` has, and those that need an environment of their own.
INSTALLED_PEERS = ("rq", "rq_simple", "huey")
OTHER_PEERS = ("dramatiq", "arq", "procrastinate")
#: Peers that forget the job of a killed worker; `berth bench job-crashes` shows it.
LOSING_PEERS = frozenset({"huey"})


class Contender(Protocol):
    """A way to run jobs. `busy`: seconds of CPU; `stamp`: a socket that gets the time of the
    start."""

    #: Its key in the result.
    name: str

    def commands(self, runners: int) -> list[tuple[Sequence[str], bytes]]:
        """Returns the processes: argument list and standard input."""

    def fill(self, count: int, busy: float) -> None:
        """Enqueues `count` jobs."""

    def enqueue(self, stamp: str) -> float:
        """Enqueues one job in the simplest way. Returns when the call began (CLOCK_MONOTONIC)."""

    def count_waiting_jobs(self) -> int:
        """Counts the jobs that no runner has taken yet."""


class OurRunner:
    """`python -m infra.lab.loadtest_job`, one process a runner. `recycle`: jobs that a child
    runs."""

    def __init__(
        self, name: str, client: Redis, url: str, recycle: int, *, lease: float = 5.0
    ) -> None:
        """Takes `lease` in seconds."""
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
        for first in range(0, count, _JOBS_PER_PIPELINE):
            pipeline = self._client.pipeline(transaction=False)
            for _ in range(min(_JOBS_PER_PIPELINE, count - first)):
                call = job_calls.enqueue(new_job(busy=busy), KEYS)
                pipeline.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
            pipeline.execute()

    def enqueue(self, stamp: str) -> float:
        began = time.monotonic()
        self.put({"stamp": stamp})
        return began

    def put(self, arguments: dict[str, Any]) -> None:
        call = job_calls.enqueue(new_job(**arguments), KEYS)
        self._client.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)

    def count_waiting_jobs(self) -> int:
        return int(self._client.zcard(job_keys.subqueue(job_keys.FLEET_TAG, "default", LOADTEST)))


class PeerContender:
    """A peer whose workers and producer run in an interpreter that has its package. The block ends
    the producer."""

    def __init__(self, name: str, url: str, python: str) -> None:
        self.name = name
        self.version = ""
        self._command = [python, "-m", PEER_MODULE]
        self._url = url
        self._stack = ExitStack()
        self._requests: IO[str]
        self._answers: IO[str]

    def __enter__(self) -> PeerContender:
        producer = subprocess.Popen(
            self._words("produce", 1),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent(os.getpid()),
        )
        self._stack.callback(producer.wait, 10)
        self._stack.callback(producer.kill)
        self._requests, self._answers = (
            self._stack.enter_context(cast(IO[str], stream))
            for stream in (producer.stdin, producer.stdout)
        )
        with self._stack:
            self.version = self._answer()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def commands(self, runners: int) -> list[tuple[Sequence[str], bytes]]:
        if self.name == "huey":  # one consumer starts all worker processes
            return [(self._words("run", runners), b"")]
        return [(self._words("run", 1), b"")] * runners

    def fill(self, count: int, busy: float) -> None:
        self._ask("fill", count, busy)

    def enqueue(self, stamp: str) -> float:
        return float(self._ask("enqueue", stamp))

    def count_waiting_jobs(self) -> int:
        return int(self._ask("left"))

    def _words(self, act: str, workers: int) -> list[str]:
        return [*self._command, act, self.name, self._url, str(workers)]

    def _ask(self, act: str, *arguments: Any) -> Any:
        try:
            self._requests.write(f"{json.dumps([act, *arguments])}\n")
            self._requests.flush()
        except BrokenPipeError as error:
            raise ServerFailed(f"the producer of {self.name} has ended") from error
        return self._answer()

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise ServerFailed(f"the producer of {self.name} has ended; its error is above")
        return json.loads(line)


class ContenderProcesses:
    """The processes of one contender, each in a session of its own; the block ends them."""

    def __init__(self, contender: Contender, runners: int, log: Path) -> None:
        self._running = []
        # Their logs go to a file: events are written in every figure.
        with log.open("ab") as out:
            for command, text in contender.commands(runners):
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
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
    """Makes one of our jobs, with a random id, as producers make them."""
    # An id need not be secret, only unique.
    job_id = f"{random.getrandbits(128):032x}"
    return Job(
        job_id=job_id,
        name=LOADTEST,
        idempotent=True,
        args=msgspec.Raw(msgspec.json.encode(arguments)),
    )


def runner_command(module: str = "infra.lab.loadtest_job") -> list[str]:
    return [sys.executable, "-P", "-m", module]


def runner_config(name: str, url: str, **settings: Any) -> bytes:
    """Returns the configuration of one of our runners."""
    return json.dumps(
        {"name": name, "valkey_url": url, "message_keys": KEYS_IN_JSON, **settings}
    ).encode()


def our_contenders(client: Redis, url: str) -> list[Contender]:
    return [
        OurRunner("fresh", client, url, recycle=1),
        OurRunner("recycled", client, url, recycle=100),
    ]


def peer_contenders(
    url: str, python: str = "", postgres_url: str = "", names: Sequence[str] = ()
) -> list[PeerContender]:
    """Returns RQ and huey in our environment, and the peers with these names in that of `python`.

    Raises `ServerFailed` when RQ or huey is not installed.
    """
    missing = [name for name in ("rq", "huey") if find_spec(name) is None]
    if missing:
        raise ServerFailed(f"{' and '.join(missing)} must be installed: the extra `bench` has them")
    return [
        *(PeerContender(name, url, sys.executable) for name in INSTALLED_PEERS),
        *(
            PeerContender(name, postgres_url if name == "procrastinate" else url, python)
            for name in names
        ),
    ]
