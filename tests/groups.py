"""Which tests one process of pytest-xdist gets as a unit, and in which order the units begin.

A unit is a module, or several modules that share an expensive fixture. Each process that runs one
of them builds its own fixture, so one process runs them all.

A busy unit runs a whole system and keeps a core busy. The others mostly wait: for timeouts,
restarts and processes. So there are more processes than cores, and at most `MAX_BUSY_UNITS` busy
units at a time, which begin first; what waits runs beside them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

#: Path, or folder with a slash at its end → the unit. The first entry that fits counts.
UNITS = {
    "tests/chaos/test_fencing.py": "chaos-system",
    "tests/chaos/test_flush.py": "chaos-system",
    "tests/chaos/test_unmarked.py": "chaos-system",
    # These have systems of their own, each of which one process starts.
    "tests/e2e/test_books_first.py": "e2e-books-first",
    "tests/e2e/test_histories.py": "e2e-histories",
    "tests/e2e/test_idle_race.py": "e2e-idle-race",
    "tests/e2e/test_second_market.py": "e2e-second-market",
    "tests/e2e/test_silent_connections.py": "e2e-silent-connections",
    "tests/e2e/test_traces.py": "e2e-traces",
    "tests/e2e/test_versions.py": "e2e-versions",
    "tests/e2e/test_worker_users.py": "e2e-worker-users",
    "tests/e2e/": "e2e-system",
    "tests/redteam/test_takeover.py": "redteam-system",
    "tests/redteam/test_worker_login.py": "redteam-system",
    "tests/compose/": "compose",
    "tests/containers/": "docker",
    "tests/contract/launchers/test_contract.py": "docker",
    "tests/contract/launchers/test_docker.py": "docker",
}
#: Busy units, in the order in which they begin, the longest first: by name or by path.
BUSY = (
    "compose",
    "e2e-system",
    "docker",
    "tests/integration/bench/test_bench.py",
    "tests/chaos/test_steps.py",
    "chaos-system",
    "e2e-versions",
    "tests/integration/local/test_restore.py",
    "tests/integration/local/test_two_releases.py",
    "tests/integration/local/test_up.py",
    "tests/chaos/test_orders.py",
    "tests/chaos/test_drill.py",
    "tests/chaos/test_host_lost.py",
    "redteam-system",
    "e2e-worker-users",
    "e2e-histories",
    "e2e-traces",
    "tests/chaos/test_late_lists.py",
    "tests/ways/test_ways.py",
    "e2e-books-first",
    "e2e-silent-connections",
    "e2e-second-market",
    "e2e-idle-race",
    "tests/integration/local/test_damage.py",
    "tests/integration/local/test_other_accounts.py",
)
#: The order of the others, the longest first: by path, or all of a folder (with a slash at its
#: end). The rest comes afterwards.
ORDER = (
    "tests/integration/worker/",
    "tests/integration/jobs/",
    "tests/integration/api/orders/",
    "tests/integration/activities/pool/",
    "tests/unit/model/",
    "tests/workflow/days/",
    "tests/contract/launchers/node/",
    "tests/contract/brokers/",
    "tests/integration/activities/",
    "tests/integration/local/",
    "tests/integration/api/",
    "tests/unit/exchange/",
    "tests/integration/database/",
    "tests/redteam/",
    "tests/workflow/",
)
#: Busy units that may run at the same time: one for each core, and two on a single one.
MAX_BUSY_UNITS = max(2, os.cpu_count() or 2)
#: Busy units that keep two cores busy: twenty containers and their health checks. Next to another
#: system, that one's API needed more than a minute to start.
DOUBLE = ("compose",)


def unit_of(path: str) -> str:
    """The unit of a test module, by its path below the root."""
    for prefix, unit in UNITS.items():
        if path == prefix or (prefix.endswith("/") and path.startswith(prefix)):
            return unit
    return path


def place_of(unit: str) -> int:
    """The number of the entry of `BUSY` or `ORDER` about this unit; behind them all if there is
    none."""
    for number, entry in enumerate((*BUSY, *ORDER)):
        if unit == entry or (entry.endswith("/") and unit.startswith(entry)):
            return number
    return len(BUSY) + len(ORDER)


def busy_places(unit: str) -> int:
    """Returns how many of `MAX_BUSY_UNITS` places a unit takes."""
    return (unit in BUSY) + (unit in DOUBLE)


def next_unit(waiting: Iterable[str], running: Collection[str]) -> str:
    """Returns the first unit that may begin next to those that run.

    Where only busy ones wait, the first of them begins.
    """
    waiting = list(waiting)
    free = MAX_BUSY_UNITS - sum(busy_places(unit) for unit in running)
    return next((unit for unit in waiting if busy_places(unit) <= max(0, free)), waiting[0])


def sort_units(items: list[pytest.Item], root: Path) -> None:
    """Puts the units in the order in which they begin. The order within a unit stays."""
    units = {item: unit_of(item.path.relative_to(root).as_posix()) for item in items}
    first_seen = {unit: number for number, unit in enumerate(dict.fromkeys(units.values()))}
    items.sort(key=lambda item: (place_of(units[item]), first_seen[units[item]]))


class UnitScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each process whole units, and not too many busy ones at a time.

    xdist's own way, `--dist loadgroup`, hands out single tests under pytest 9.2: it renames tests
    by an attribute that pytest no longer has. These methods are the ones that xdist's schedulers
    override.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        running = [
            unit
            for units in self.assigned_work.values()
            for unit, tests in units.items()
            if not all(tests.values())
        ]
        self.workqueue.move_to_end(next_unit(self.workqueue, running), last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid.partition("::")[0])
