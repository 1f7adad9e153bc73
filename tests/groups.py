"""Which tests one process of pytest-xdist gets as a unit, and which of the units begin first.

A unit is a module, or several modules that share an expensive fixture. Each process that runs one of them
builds its own fixture, so one process runs them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

#: Path, or folder with a slash at its end → the unit. The first entry that fits counts.
UNITS = {
    "tests/chaos/test_fencing.py": "chaos-house",
    "tests/chaos/test_flush.py": "chaos-house",
    "tests/chaos/test_unmarked.py": "chaos-house",
    "tests/e2e/test_idle_race.py": "e2e-idle-race",
    "tests/e2e/test_versions.py": "e2e-versions",
    "tests/e2e/": "e2e-house",
    "tests/containers/": "docker",
    "tests/contract/launchers/test_contract.py": "docker",
    "tests/contract/launchers/test_docker.py": "docker",
}
#: Units and modules that take longest, the longest first: none of them may begin last and run alone.
FIRST = (
    "docker",
    "e2e-house",
    "tests/chaos/test_steps.py",
    "tests/integration/bench/test_bench.py",
    "chaos-house",
    "e2e-versions",
    "tests/chaos/test_orders.py",
    "tests/integration/jobs/runner/test_chaos.py",
    "tests/unit/model/test_one_owner_safeguards.py",
    "tests/unit/model/test_one_owner.py",
)


def unit_of(path: str) -> str:
    """The unit of a test module, by its path below the root."""
    for prefix, unit in UNITS.items():
        if path == prefix or (prefix.endswith("/") and path.startswith(prefix)):
            return unit
    return path


def sort_units(items: list[pytest.Item], root: Path) -> None:
    """Puts the units in the order in which they begin. The order within a unit stays."""
    units = {item: unit_of(item.path.relative_to(root).as_posix()) for item in items}
    rank = {unit: number for number, unit in enumerate(dict.fromkeys([*FIRST, *units.values()]))}
    items.sort(key=lambda item: rank[units[item]])


class UnitScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each process whole units.

    xdist's own way, `--dist loadgroup`, hands out single tests under pytest 9.2: it renames tests by an
    attribute that pytest no longer has. This method is the one that xdist's schedulers override.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid.partition("::")[0])
