"""`berth chaos` refuses wrong options before it starts anything."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from infra.cli.app import app


@pytest.mark.parametrize(
    "words",
    [["--minutes", "0"], ["--seed", "-1"], ["--users", "0"], ["--rate", "0"], ["--users", "many"]],
)
def test_an_option_that_makes_no_sense_is_refused_at_once(words: list[str]) -> None:
    done = CliRunner().invoke(
        app, ["chaos", "orders", *words], env={"NO_COLOR": "1", "COLUMNS": "200"}
    )
    assert done.exit_code == 2
    assert "Invalid value" in done.output
