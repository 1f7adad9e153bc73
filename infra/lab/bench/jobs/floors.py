"""Floors that no runner can beat:
`python -m infra.lab.bench.jobs.floors pop|fork URL N` prints a rate."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from urllib.parse import urlsplit

import hiredis

_KEY = "floor"


def pop(url: str, count: int) -> float:
    """Measures a loop of BZPOPMAX by the leanest client: no lease, no result, no process."""
    parts = urlsplit(url)
    reader = hiredis.Reader(notEnoughData=None)
    with socket.create_connection((parts.hostname or "", parts.port or 6379)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ask(*command: str | int) -> object:
            link.sendall(hiredis.pack_command(command))  # type: ignore[arg-type]  # a tuple of any length
            while (reply := reader.gets()) is None:
                reader.feed(link.recv(65536))
            return reply

        for first in range(0, count, 500):
            members = range(first, min(first + 500, count))
            ask("ZADD", _KEY, *(word for number in members for word in (number, f"job-{number}")))
        began = time.perf_counter()
        for _ in range(count):
            ask("BZPOPMAX", _KEY, 1)
        return count / (time.perf_counter() - began)


def fork(count: int) -> float:
    """Measures a fork and a wait for each job, by a parent of a runner's size."""
    import worker_runtime.jobs.protocol.calls  # noqa: F401 — for the size of the parent

    gc.collect()
    gc.freeze()
    began = time.perf_counter()
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return count / (time.perf_counter() - began)


if __name__ == "__main__":
    print(pop(sys.argv[2], int(sys.argv[3])) if sys.argv[1] == "pop" else fork(int(sys.argv[3])))
