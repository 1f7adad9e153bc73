"""Which tests one process of pytest-xdist gets as a unit, and in which order the units begin.

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
    "tests/compose/": "compose",
    "tests/containers/": "docker",
    "tests/contract/launchers/test_contract.py": "docker",
    "tests/contract/launchers/test_docker.py": "docker",
}
#: The order in which units begin: by name, by path, or all of a folder (with a slash at its end). The rest
#: comes afterwards. A unit that runs the whole system needs both cores, and two of them at once slow each
#: other down. So each is followed by modules that mostly wait and take about as long: they run beside it.
ORDER = (
    "e2e-house",
    "tests/integration/worker/",
    "tests/contract/brokers/",
    "tests/chaos/test_steps.py",
    "tests/contract/launchers/node/",
    "tests/integration/activities/pool/",
    "chaos-house",
    "tests/integration/jobs/",
    "tests/redteam/",
    "docker",
    "tests/integration/activities/",
    "compose",
    "tests/integration/database/",
    "tests/integration/bench/test_bench.py",
    "tests/integration/api/orders/",
    "e2e-versions",
    "tests/integration/api/workers/",
    "e2e-idle-race",
    "tests/integration/api/",
    "tests/chaos/test_orders.py",
    "tests/unit/model/",
    "tests/unit/exchange/",
    "tests/integration/local/test_up.py",
    "tests/workflow/",
    "tests/integration/local/test_damage.py",
    "tests/integration/local/",
    "tests/ways/test_ways.py",
)


def unit_of(path: str) -> str:
    """The unit of a test module, by its path below the root."""
    for prefix, unit in UNITS.items():
        if path == prefix or (prefix.endswith("/") and path.startswith(prefix)):
            return unit
    return path


def place_of(unit: str) -> int:
    """The number of the entry of `ORDER` that is about this unit; behind them all if there is none."""
    for number, entry in enumerate(ORDER):
        if unit == entry or (entry.endswith("/") and unit.startswith(entry)):
            return number
    return len(ORDER)


def sort_units(items: list[pytest.Item], root: Path) -> None:
    """Puts the units in the order in which they begin. The order within a unit stays."""
    units = {item: unit_of(item.path.relative_to(root).as_posix()) for item in items}
    found = {unit: number for number, unit in enumerate(dict.fromkeys(units.values()))}
    items.sort(key=lambda item: (place_of(units[item]), found[units[item]]))


class UnitScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each process whole units.

    xdist's own way, `--dist loadgroup`, hands out single tests under pytest 9.2: it renames tests by an
    attribute that pytest no longer has. This method is the one that xdist's schedulers override.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid.partition("::")[0])
