"""The workers' own logs: one file a worker, of bounded size.

A worker writes to its file directly, not through the node, so that it survives the node's death. Files are
opened for appending, so one that grew too long can be cut at its start while the worker goes on writing.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: Bytes a log may have before it is cut; as much again is kept in `<worker>.log.1`.
LOG_CAP = 4 * 1024 * 1024
#: Logs kept, newest first.
LOGS_KEPT = 300
#: Seconds between two looks; what a runaway worker writes in that time comes on top of the cap.
LOG_PERIOD = 5.0


class WorkerLogs:
    def __init__(self, folder: Path, *, cap: int = LOG_CAP, kept: int = LOGS_KEPT) -> None:
        self._folder = folder
        self._cap = cap
        self._kept = kept
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def open(self, worker_id: str) -> int:
        """A descriptor to which a worker's output goes."""
        path = self._folder / f"{worker_id}.log"
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def sweep(self, living: set[str]) -> None:
        """Cuts what is too long and removes the oldest logs of workers that are no longer `living`."""
        ages: list[tuple[float, Path]] = []
        for path in self._folder.glob("*.log"):
            with contextlib.suppress(OSError):
                facts = path.stat()
                if facts.st_size > self._cap:
                    self._cut(path, facts.st_size)
                if path.stem not in living:
                    ages.append((facts.st_mtime, path))
        ages.sort(reverse=True)
        for _, path in ages[self._kept :]:
            path.unlink(missing_ok=True)
            path.with_suffix(".log.1").unlink(missing_ok=True)

    def _cut(self, path: Path, size: int) -> None:
        with path.open("r+b") as file:
            file.seek(size - self._cap)
            descriptor = os.open(
                path.with_suffix(".log.1"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
            )
            with open(descriptor, "wb") as older:
                older.write(file.read(self._cap))
            file.truncate(0)
