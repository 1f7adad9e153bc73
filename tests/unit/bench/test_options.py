"""`berth bench` refuses wrong options before it starts anything."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from infra.cli.app import app


@pytest.mark.parametrize(
    "words",
    [
        ["idle", "--workers", "500,many"],
        ["idle", "--workers", "0"],
        ["idle", "--minutes", "0"],
        ["heartbeat", "--quota", ""],
        ["heartbeat", "--load", "prayers"],
        ["recovery", "-n", "0"],
        ["beside", "..", "--work", "jobs"],
    ],
)
def test_an_option_that_makes_no_sense_is_refused_at_once(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", *words], env={"NO_COLOR": "1", "COLUMNS": "200"})
    assert done.exit_code == 2
    assert "Invalid value" in done.output
