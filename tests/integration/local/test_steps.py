from __future__ import annotations

import threading

import pytest

from infra.local import steps
from infra.local.steps import Progress, Status, Step


def test_a_step_begins_when_those_it_needs_are_done_and_others_run_beside_it() -> None:
    together = threading.Barrier(2, timeout=5)
    order: list[str] = []

    def beside() -> str:
        together.wait()
        return "met"

    def last() -> str:
        order.append("last")
        return ""

    changes: list[Progress] = []
    steps.run(
        [Step("last", last, ("a", "b")), Step("a", beside), Step("b", beside)], changes.append, lambda: None
    )
    assert order == ["last"]
    done = [change.step for change in changes if change.status is Status.DONE]
    assert done[-1] == "last"
    assert {change.detail for change in changes if change.step == "a"} == {"", "met"}


def test_the_first_failure_is_raised_and_the_others_are_given_up() -> None:
    given_up = threading.Event()
    never: list[str] = []

    def fail() -> str:
        raise ValueError("first")

    def note() -> str:
        never.append("ran")
        return ""

    def wait() -> str:
        assert given_up.wait(5)
        raise RuntimeError("second")

    with pytest.raises(ValueError, match="first"):
        steps.run(
            [
                Step("fails", fail),
                Step("waits", wait),
                Step("never", note, ("fails",)),
            ],
            steps.silent,
            given_up.set,
        )
    assert given_up.is_set()
    assert never == []
