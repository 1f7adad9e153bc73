"""`python -m infra.lab.bench.starvation.cpu_load processes|threads N`:
keeps all CPUs of its cgroup busy.

It begins with a line on standard input, and ends when that is closed.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading

#: Bytes of one hash; hashlib releases the GIL for more than 2,047 of them.
_CHUNK_BYTES = 1 << 20


def _spin(parent: int) -> None:
    """Keeps busy in Python until the parent has gone."""
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


def _hash() -> None:
    data = bytes(_CHUNK_BYTES)
    while True:
        hashlib.sha256(data).digest()


def main(kind: str, count: int) -> None:
    sys.stdin.readline()
    parent = os.getpid()
    for _ in range(count):
        if kind == "threads":
            threading.Thread(target=_hash, daemon=True).start()
        elif os.fork() == 0:
            _spin(parent)
            os._exit(0)
    sys.stdin.read()
    os._exit(0)  # at once: the threads never end by themselves


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
