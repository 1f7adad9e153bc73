"""Each option of a job type, through a real runner, its fork server and its children."""

from __future__ import annotations

from tests.integration.jobs.own.application import Application


def test_a_plain_function_runs_with_checked_arguments(shop: Application) -> None:
    lines = [{"article": "a", "pieces": 2}, {"article": "b", "pieces": 3}]
    assert shop.value(shop.add("total", lines=lines, factor=2.0)) == 10.0
    assert shop.failure(shop.add("total", lines=[{"article": "a", "pieces": 0}]))[0] == "MALFORMED_MESSAGE"
