"""Contains the whole system with short times, whose workers reach Valkey through a proxy."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.proxies.worker_lines import WorkerLines
from tests.support.systems.local import RunningSystem, Trader

POOL = 6

#: Seconds; 5 of them are the lease's margin, and 5 bear a machine that stands still for a moment.
MARK_TTL = 10.0

#: Seconds; a healthy session is not replaced because the machine stood still for a moment: tests
#: compare the processes of workers before and after.
PULSE_TIMEOUT = 8.0

#: Users with a worker to whom nothing happens. They are many, because no missing mark is reported
#: while a fifth of all is missing (no-healthy-kill).
BYSTANDERS = 18


@dataclass(frozen=True)
class ChaosSystem:
    system: RunningSystem
    lines: WorkerLines
    bystanders: tuple[Trader, ...]
