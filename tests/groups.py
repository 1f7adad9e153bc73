"""Which tests one process of pytest-xdist gets as a unit, and in which order the units begin.

A unit is a module, or several modules that share an expensive fixture. Each process that runs one
of them builds its own fixture, so one process runs them all.

A busy unit runs a whole system and keeps a core busy. The others mostly wait: for timeouts,
restarts and processes. So there are more processes than cores, and at most `MAX_BUSY_UNITS` busy
units at a time, which begin first. A unit that takes two places has no busy one next to it: a
process that could begin only a busy one waits.
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
    "tests/redteam/test_fleet_flood.py": "redteam-floods",
    "tests/redteam/test_memory_flood.py": "redteam-floods",
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
    "redteam-floods",
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
    "tests/integration/local/test_shells.py",
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
#: Busy units that keep two cores busy, or compare what a user waits for with and without a fault.
DOUBLE = (
    "compose",  # twenty containers and their health checks
    "redteam-floods",
    "tests/chaos/test_drill.py",  # fifty workers, replaced in minutes
    "e2e-worker-users",
    "e2e-silent-connections",
)


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


def may_run_together(units: Iterable[str]) -> bool:
    """Returns True if these units may run at the same time."""
    return sum(busy_places(unit) for unit in units) <= MAX_BUSY_UNITS


def next_unit(waiting: Iterable[str], running: Collection[str]) -> str | None:
    """Returns the first unit that may begin next to those that other processes run; None if there
    is none."""
    return next(
        (unit for unit in waiting if busy_places(unit) == 0 or may_run_together([unit, *running])),
        None,
    )


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

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        super().mark_test_complete(node, item_index, duration)
        for other in self.nodes:  # those that wait may begin another unit now, or end
            if other is not node:
                self._reschedule(other)

    def _reschedule(self, node: WorkerController) -> None:
        """Assigns another unit to a process that has few tests left, or ends it after its last."""
        if self.workqueue or node.shutting_down or not self._must_wait(node):
            super()._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Assigns a unit to the process, unless it has to wait for the end of another one's."""
        if not self._must_wait(node):
            unit = next_unit(self.workqueue, self._running_beside(node))
            self.workqueue.move_to_end(unit or next(iter(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    def _must_wait(self, node: WorkerController) -> bool:
        """Returns True if neither the process's last test nor a new unit may begin now.

        A process that waits keeps its last test, because pytest-xdist runs a test only when the
        next one is known. It does not wait if all others do.
        """
        running = self._running_beside(node)
        last_test_of = self._unfinished(node)
        if may_run_together([*last_test_of, *running]) and (
            not self.workqueue or next_unit(self.workqueue, running)
        ):
            return False
        return any(self._runs_tests(other) for other in self.nodes if other != node)

    def _runs_tests(self, node: WorkerController) -> bool:
        """Returns True if the process has a test to run and knows the next one, or that there is
        none."""
        return bool(self._pending_of(self.assigned_work[node]) > (0 if node.shutting_down else 1))

    def _running_beside(self, node: WorkerController) -> list[str]:
        """Returns the units that other processes have begun, or will begin next."""
        return [unit for other in self.nodes if other != node for unit in self._unfinished(other)]

    def _unfinished(self, node: WorkerController) -> list[str]:
        work = self.assigned_work[node]
        return [unit for unit, tests in work.items() if not all(tests.values())]

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid.partition("::")[0])
