"""Runners with a job for load tests and chaos runs: `python -m infra.lab.loadtest_job`.

Production runners do not know this job: a message could make it write to any file. Without an
argument this is one runner, configured on standard input as always. With `fleet` it forks a runner
for each configuration, one a line, and prints its process id. A fork costs 5 ms instead of the 150
ms of a Python that starts, so thousands of runners can be killed within minutes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
from base64 import b64encode
from typing import NoReturn

import msgspec

from worker_runtime.jobs.__main__ import main
from worker_runtime.jobs.config import parse_config
from worker_runtime.jobs.runner import JobRunner
from worker_runtime.jobs.types.job_registry import JobRegistry
from worker_runtime.jobs.types.job_type import JobContext, JobType
from worker_runtime.process import kernel
from worker_runtime.process.log import Log
from worker_runtime.protocol.authentication import KEY_BYTES, MessageKey

#: Bytes of one hash; hashlib releases the GIL for more than 2,047 of them.
_CHUNK_BYTES = 1 << 20


class LoadtestArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Says what a job does. By default it returns at once."""

    #: Seconds of CPU time that it uses.
    busy: float = 0.0
    #: Seconds of wall time for which it keeps a CPU busy; with `threads`, in that many threads.
    spins: float = 0.0
    threads: int = 0
    #: Seconds that it waits.
    sleeps: float = 0.0
    #: A file that it waits for before it does anything.
    gate: str = ""
    #: A Unix datagram socket that gets the time of its start (CLOCK_MONOTONIC, a double).
    stamp: str = ""
    #: A file that gets a line at its start and one at its end.
    ledger: str = ""


def run_loadtest(arguments: LoadtestArguments, context: JobContext) -> None:
    began = time.monotonic()
    if arguments.stamp:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.sendto(struct.pack("d", began), arguments.stamp)
    if arguments.ledger:
        _write_ledger(arguments.ledger, "start", context)
    while arguments.gate and not os.path.exists(arguments.gate):
        time.sleep(0.02)
    if arguments.busy:
        until = time.thread_time() + arguments.busy
        while time.thread_time() < until:
            pass
    if arguments.spins:
        _spin(time.monotonic() + arguments.spins, arguments.threads)
    if arguments.sleeps:
        time.sleep(arguments.sleeps)
    if arguments.ledger:
        _write_ledger(arguments.ledger, "end", context)


def _write_ledger(ledger: str, mark: str, context: JobContext) -> None:
    """Writes once to a file that is open for appending: lines of several processes do not mix."""
    line = (
        f"{mark} {context.job_id} {context.attempt} {context.fence} {os.getppid()} "
        f"{time.monotonic():.6f}\n"
    )
    descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def _spin(until: float, threads: int) -> None:
    # The runner does not load these: every module makes its forks dearer.
    import hashlib
    import threading

    def hash_on() -> None:
        data = bytes(_CHUNK_BYTES)
        while time.monotonic() < until:
            hashlib.sha256(data).digest()

    for _ in range(threads):
        threading.Thread(target=hash_on, daemon=True).start()
    while time.monotonic() < until:
        if threads:
            time.sleep(0.05)


#: Under which jobs of the lab are signed.
KEYS = (MessageKey(1, bytes(KEY_BYTES)),)
KEYS_IN_JSON = [[1, b64encode(bytes(KEY_BYTES)).decode()]]

LOADTEST = JobType(name="loadtest", arguments=LoadtestArguments, run=run_loadtest)
#: The same under another name, for jobs that are mostly short, so that they are prefetched.
LOADTEST_BRIEF = JobType(name="loadtest_brief", arguments=LoadtestArguments, run=run_loadtest)


def fleet(registry: JobRegistry) -> NoReturn:
    """Forks a runner for each configuration that comes in, until standard input is closed."""
    own = os.getpid()
    pending = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.05)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not ready:
            continue
        data = os.read(0, 65536)
        if not data:
            os._exit(0)  # the runners end with this process
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            pid = os.fork()
            if pid == 0:
                _run_child(own, line, registry)
            os.write(1, f"{pid}\n".encode())


def _run_child(parent: int, line: bytes, registry: JobRegistry) -> NoReturn:
    code = 1
    try:
        kernel.die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        config = parse_config(line)
        code = JobRunner(
            config, registry, Log(config.log_level, runner=config.name, process="jobs")
        ).run()
    finally:
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:] == ["fleet"]:
        fleet(JobRegistry(LOADTEST, LOADTEST_BRIEF))
    sys.exit(main(JobRegistry(LOADTEST)))
