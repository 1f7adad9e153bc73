"""The units of the suite name modules that exist."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.groups import (
    BUSY,
    DOUBLE,
    MAX_BUSY_UNITS,
    ORDER,
    UNITS,
    UnitScheduling,
    busy_places,
    next_unit,
    place_of,
    unit_of,
)

SINGLE = [unit for unit in BUSY if unit not in DOUBLE]
ROOT = Path(__file__).resolve().parents[2]


def test_every_unit_has_its_modules() -> None:
    missing = [path for path in UNITS if not (ROOT / path).exists()]
    entries = (*BUSY, *ORDER)
    missing += [
        entry for entry in entries if entry not in UNITS.values() and not (ROOT / entry).exists()
    ]
    assert missing == []


def test_modules_that_share_a_system_are_one_unit() -> None:
    assert unit_of("tests/chaos/test_fencing.py") == unit_of("tests/chaos/test_flush.py")
    assert unit_of("tests/e2e/test_trading.py") == unit_of("tests/e2e/test_secrets.py")
    assert unit_of("tests/e2e/test_versions.py") != unit_of("tests/e2e/test_secrets.py")
    assert unit_of("tests/unit/test_groups.py") == "tests/unit/test_groups.py"


def test_a_units_place_is_that_of_its_name_or_of_its_folder_and_else_the_last() -> None:
    assert place_of("e2e-system") < place_of("tests/integration/worker/trading/test_limits.py")
    assert place_of("tests/integration/activities/pool/test_rollout.py") < place_of(
        "tests/unit/model/test_x.py"
    )
    assert place_of("tests/integration/activities/events/test_events.py") > place_of(
        "tests/unit/model/"
    )
    assert place_of("tests/unit/test_groups.py") == len(BUSY) + len(ORDER)


def test_a_busy_unit_begins_while_few_of_its_kind_run() -> None:
    assert (
        next_unit(["chaos-system", "tests/unit/test_log.py"], ["e2e-system", "a"]) == "chaos-system"
    )


def test_a_waiting_unit_begins_next_to_enough_busy_ones() -> None:
    running = list(SINGLE[:MAX_BUSY_UNITS])
    waiting = [SINGLE[MAX_BUSY_UNITS], "tests/unit/test_log.py", "tests/unit/test_rooms.py"]
    assert next_unit(waiting, running) == "tests/unit/test_log.py"


def test_busy_units_wait_for_enough_others_to_end() -> None:
    running = list(SINGLE[:MAX_BUSY_UNITS])
    assert next_unit(SINGLE[MAX_BUSY_UNITS:], running) is None


def test_no_busy_unit_begins_next_to_one_that_takes_two_places() -> None:
    double = DOUBLE[0]
    waiting = [SINGLE[0], "tests/unit/test_log.py"]
    others = [double, *SINGLE[: MAX_BUSY_UNITS - 2]]
    assert next_unit(waiting, others) == "tests/unit/test_log.py"
    assert next_unit([double, "tests/unit/test_log.py"], SINGLE[: MAX_BUSY_UNITS - 1]) == (
        "tests/unit/test_log.py"
    )
    assert next_unit([double, SINGLE[0]], []) == double


class Process:
    """Stands for one of pytest-xdist: it runs a test once it knows the next one, or its end."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.queue: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def run_units(units: dict[str, int], processes: int) -> list[list[str]]:
    """Schedules units, given by their number of tests; returns the units that ran at the same time,
    for each round in which every process that may do so runs a test."""
    tests = [f"{unit}::test_{number}" for unit, count in units.items() for number in range(count)]
    config = SimpleNamespace(
        getvalue=lambda name: [f"{processes}*popen"], option=SimpleNamespace(loadscopereorder=False)
    )
    scheduling = UnitScheduling(config, None)
    nodes = [Process(f"gw{number}") for number in range(processes)]
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, tests)
    scheduling.schedule()
    rounds: list[list[str]] = []
    while any(node.queue for node in nodes):
        able = [
            node for node in nodes if node.queue and (len(node.queue) > 1 or node.shutting_down)
        ]
        assert able, "every process waits"
        rounds.append([unit_of(tests[node.queue[0]].partition("::")[0]) for node in able])
        for node in able:
            scheduling.mark_test_complete(node, node.queue.pop(0))
    ran = [unit for units_at_once in rounds for unit in units_at_once]
    assert Counter(ran) == Counter({unit_of(unit): count for unit, count in units.items()})
    return rounds


def module_of(unit: str) -> str:
    return next((path for path, name in UNITS.items() if name == unit), unit)


#: Modules whose units take one place, and two.
SINGLE_MODULES = [module_of(unit) for unit in SINGLE]
DOUBLE_MODULES = [module_of(unit) for unit in DOUBLE]


@pytest.mark.parametrize("processes", [2, 3])
def test_a_unit_of_two_places_runs_next_to_no_busy_one(processes: int) -> None:
    modules = [DOUBLE_MODULES[0], *SINGLE_MODULES[:4], DOUBLE_MODULES[1], "tests/unit/test_log.py"]
    for order in itertools.permutations(modules[:6]):
        for counts in ((5, 1, 3, 2, 4, 6), (1, 1, 1, 1, 1, 1), (2, 7, 1, 3, 2, 1)):
            units = dict(zip(order, counts, strict=True))
            units["tests/unit/test_log.py"] = 3
            for units_at_once in run_units(units, processes):
                places = sum(busy_places(unit) for unit in units_at_once)
                assert places <= MAX_BUSY_UNITS, (units, units_at_once)
