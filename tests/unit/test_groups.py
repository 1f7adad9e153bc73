"""The units of the suite name modules that exist."""

from __future__ import annotations

from pathlib import Path

from tests.groups import (
    BUSY,
    DOUBLE,
    MAX_BUSY_UNITS,
    ORDER,
    UNITS,
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


def test_busy_units_that_are_left_alone_begin_nevertheless() -> None:
    running = list(SINGLE[:MAX_BUSY_UNITS])
    assert next_unit(SINGLE[MAX_BUSY_UNITS:], running) == SINGLE[MAX_BUSY_UNITS]


def test_no_busy_unit_begins_next_to_one_that_takes_two_places() -> None:
    [double] = DOUBLE
    waiting = [SINGLE[0], "tests/unit/test_log.py"]
    others = [double, *SINGLE[: MAX_BUSY_UNITS - 2]]
    assert next_unit(waiting, others) == "tests/unit/test_log.py"
    assert next_unit([double, "tests/unit/test_log.py"], SINGLE[: MAX_BUSY_UNITS - 1]) == (
        "tests/unit/test_log.py"
    )
    assert next_unit([double, SINGLE[0]], []) == double
