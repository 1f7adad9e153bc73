"""The argument of docs/how-it-works/one-owner.md, explored exhaustively within small bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.model.explore import explore
from tests.unit.model.state import CONFIRMED, HOST_LOST, MARK_PROVES, UNKNOWN_WORKERS, Rules

#: An exploration takes 10 to 30 s of a core, and a busy machine may give it a fifth of one.
pytestmark = pytest.mark.timeout(300)


def test_no_interleaving_breaks_one_owner_while_the_launcher_confirms_each_end() -> None:
    explored = explore(CONFIRMED)
    assert explored.violation is None, explored.story
    assert explored.worlds > 100_000  # it did explore: freezes, flush, late messages, replacement


def test_no_interleaving_breaks_one_owner_when_a_host_is_lost_and_its_worker_runs_on() -> None:
    explored = explore(HOST_LOST)
    assert explored.violation is None, explored.story
    assert explored.worlds > 50_000


@pytest.mark.parametrize(
    "rules",
    [replace(MARK_PROVES, flushes=0), replace(MARK_PROVES, orders=0)],
    ids=["orders", "a flush"],
)
def test_no_interleaving_breaks_one_owner_when_a_mark_that_has_run_out_is_believed(
    rules: Rules,
) -> None:
    """Orders and a flush together take ten times as long; they were explored once."""
    explored = explore(rules)
    assert explored.violation is None, explored.story
    assert explored.worlds > 50_000


def test_no_interleaving_breaks_one_owner_when_no_workflow_knows_of_a_worker() -> None:
    explored = explore(UNKNOWN_WORKERS)
    assert explored.violation is None, explored.story
    assert explored.worlds > 50_000
