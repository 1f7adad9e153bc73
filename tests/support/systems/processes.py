"""Finds processes: whether one runs, and which belong to a data folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil


def alive(pid: int) -> bool:
    """Returns True if the process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # Gone before it was opened, or before it was read.
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def processes_of(folder: Path) -> list[str]:
    """Living processes that name the folder in their command line or in their environment."""
    text = str(folder).encode()
    living = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            facts = (
                Path(f"/proc/{entry}/cmdline").read_bytes()
                + Path(f"/proc/{entry}/environ").read_bytes()
            )
            if text in facts and psutil.Process(int(entry)).status() != psutil.STATUS_ZOMBIE:
                living.append(f"{entry} {psutil.Process(int(entry)).cmdline()}")
        except (OSError, psutil.Error):
            continue
    return living


def wait_nothing_left(folder: Path, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while running := processes_of(folder):
        assert time.monotonic() < deadline, f"still there: {running}"
        time.sleep(0.05)
