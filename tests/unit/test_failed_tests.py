from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import pytest_runtest_logreport


def report(outcome: str, longrepr: str | None) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid="tests/test_orders.py::test_an_order_is_placed",
        location=("tests/test_orders.py", 1, "test_an_order_is_placed"),
        keywords={},
        outcome=outcome,  # type: ignore[arg-type]
        longrepr=longrepr,
        when="setup",
    )


def test_only_failures_are_listed_with_their_reason_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = tmp_path / "failed-tests"
    monkeypatch.setenv("BERTH_FAILED_TESTS", str(failures))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)

    pytest_runtest_logreport(report("passed", None))
    pytest_runtest_logreport(report("failed", "no server\n  within 5 s"))

    assert failures.read_text() == (
        "tests/test_orders.py::test_an_order_is_placed (setup): no server within 5 s\n"
    )
