"""A claimer's ledger: the worker of each of its claims, in a file that outlives the claimer.

Claims and workers are numbers, so that millions fit in memory. The ledger stands for a workflow's
history: the process that takes over continues with the first claim that has no worker yet, under
the same claim ids.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from types import TracebackType
from typing import Self

POOL = "race"
#: The messages of claimers to the workers: `worker claim`.
DELIVERIES = "race:deliveries"


def worker_id(number: int) -> str:
    """Returns the id of a worker. Numbers begin at 1."""
    return f"w{number}"


def number_of(worker: bytes) -> int:
    return int(worker[1:])


def claim_id(claimer: int, number: int) -> str:
    return f"{claimer}-{number}"


_RECORD_BYTES = 8
#: No worker yet.
OPEN = 0


class ClaimLedger:
    """Numbers of workers, by number of claim."""

    def __init__(self, path: Path, count: int = 0) -> None:
        """Opens the ledger; `count` is the number of claims of a new one."""
        if count:
            path.write_bytes(bytes(count * _RECORD_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.workers = memoryview(self._memory).cast("q")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.workers.release()
        self._memory.close()

    def done(self) -> int:
        """Claims that have a worker; they are filled in order."""
        low, high = 0, len(self.workers)
        while low < high:
            middle = (low + high) // 2
            if self.workers[middle] == OPEN:
                high = middle
            else:
                low = middle + 1
        return low
