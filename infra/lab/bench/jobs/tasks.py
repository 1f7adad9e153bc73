"""The peers' job, which does what ours does (`infra.lab.loadtest_job`)."""

from __future__ import annotations

import socket
import struct
import time

#: Jobs that a worker of the crash matrix runs at once (`crashes.py`).
MAX_CONCURRENT_JOBS = 2


def perform(busy: float = 0.0, stamp: str = "") -> None:
    """Uses `busy` seconds of CPU; `stamp` is a datagram socket that gets the time of the start."""
    began = time.monotonic()
    if stamp:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.sendto(struct.pack("d", began), stamp)
    if busy:
        until = time.thread_time() + busy
        while time.thread_time() < until:
            pass
