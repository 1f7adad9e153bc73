"""Which tests one process of pytest-xdist gets as a unit, and which of the units begin first.

A unit is a module, or several modules that share an expensive fixture. Each process that runs one of them
builds its own fixture, so one process runs them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

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
    "chaos/test_steps",
    "integration/bench/test_bench",
    "chaos-house",
    "e2e-versions",
    "chaos/test_orders",
    "integration/jobs/runner/test_chaos",
)


def unit_of(path: str) -> str:
    """The unit of a test module, by its path below the root. It stands in the names that xdist reports."""
    for prefix, unit in UNITS.items():
        if path == prefix or (prefix.endswith("/") and path.startswith(prefix)):
            return unit
    return path.removeprefix("tests/").removesuffix(".py")


def group_items(items: list[pytest.Item], root: Path) -> None:
    """Marks each test with its unit, and sorts the units. The order within a unit stays."""
    units = {item: unit_of(item.path.relative_to(root).as_posix()) for item in items}
    for item, unit in units.items():
        item.add_marker(pytest.mark.xdist_group(unit))
    found = dict.fromkeys([*FIRST, *units.values()])
    rank = {unit: number for number, unit in enumerate(found)}
    items.sort(key=lambda item: rank[units[item]])
