"""docs/how-it-works/lifecycle.md shows the states as they are in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.workflows.lifecycle_diagram import (
    AT_DEADLINE,
    WHY,
    diagram,
    duration,
    render_page,
    table,
)
from workflows.user_worker import workflow
from workflows.user_worker.messages import WorkerState
from workflows.user_worker.state import ALLOWED

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-it-works" / "lifecycle.md"


def test_the_page_shows_what_the_code_says() -> None:
    """If not: `python -m tests.unit.workflows.lifecycle_diagram docs/how-it-works/lifecycle.md`."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == render_page(page)


def test_every_transition_has_its_reason_and_every_state_its_end() -> None:
    assert set(WHY) == {(before, after) for before, follow in ALLOWED.items() for after in follow}
    assert set(AT_DEADLINE) == set(WorkerState)


def test_a_transition_more_would_be_seen_in_the_picture() -> None:
    assert diagram().count("-->") == sum(len(follow) for follow in ALLOWED.values()) + 2
    assert all(f"| {state} |" in table() for state in WorkerState)


def test_the_docstring_of_the_workflow_says_what_ends_each_state() -> None:
    rows = re.findall(r"^\| (\w+) \|", workflow.__doc__ or "", re.M)
    assert rows[1:] == [str(state) for state in ALLOWED]
    for name in re.findall(r"`(_\w+)`", workflow.__doc__ or ""):
        assert hasattr(workflow.UserWorkerWorkflow, name), name


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        render_page("# A page")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-"), (65.0, "65 s"), (60.0, "60 s"), (1800.0, "30 min"), (86400.0, "24 h")],
)
def test_durations_are_for_people(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words
