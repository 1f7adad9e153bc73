"""The units of the suite name modules that exist."""

from __future__ import annotations

from pathlib import Path

from tests.groups import FIRST, UNITS, unit_of

ROOT = Path(__file__).resolve().parents[2]


def test_every_unit_has_its_modules() -> None:
    missing = [path for path in UNITS if not (ROOT / path).exists()]
    missing += [unit for unit in FIRST if unit not in UNITS.values() and not (ROOT / unit).exists()]
    assert missing == []


def test_modules_that_share_a_house_are_one_unit() -> None:
    assert unit_of("tests/chaos/test_fencing.py") == unit_of("tests/chaos/test_flush.py")
    assert unit_of("tests/e2e/test_trading.py") == unit_of("tests/e2e/test_secrets.py")
    assert unit_of("tests/e2e/test_versions.py") != unit_of("tests/e2e/test_secrets.py")
    assert unit_of("tests/unit/test_groups.py") == "tests/unit/test_groups.py"
