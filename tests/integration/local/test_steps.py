from __future__ import annotations

import threading
from subprocess import TimeoutExpired

import pytest

from infra.local import steps
from infra.local.process import ServerFailed, StartAborted, telling_line
from infra.local.steps import StartStep, StepProgress, StepStatus


def test_a_step_begins_when_those_it_needs_are_done_and_others_run_in_parallel() -> None:
    together = threading.Barrier(2, timeout=30)
    order: list[str] = []

    def beside() -> str:
        together.wait()
        return "met"

    def last() -> str:
        order.append("last")
        return ""

    changes: list[StepProgress] = []
    steps.run_steps(
        [StartStep("last", last, ("a", "b")), StartStep("a", beside), StartStep("b", beside)],
        changes.append,
        lambda: None,
    )
    assert order == ["last"]
    done = [change.step for change in changes if change.status is StepStatus.DONE]
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
        assert given_up.wait(30)
        raise RuntimeError("second")

    with pytest.raises(ServerFailed, match=r"^fails: ValueError: first$"):
        steps.run_steps(
            [
                StartStep("fails", fail),
                StartStep("waits", wait),
                StartStep("never", note, ("fails",)),
            ],
            lambda change: None,
            given_up.set,
        )
    assert given_up.is_set()
    assert never == []


def test_a_step_that_was_only_given_up_is_neither_failed_nor_the_cause() -> None:
    given_up = threading.Event()
    changes: list[StepProgress] = []

    def fail() -> str:
        given_up.wait(0.05)
        raise ServerFailed("valkey ended while starting: the disk is full")

    def wait() -> str:
        given_up.wait(30)
        raise StartAborted("postgres: given up")

    steps_of_start = [StartStep("postgres", wait), StartStep("valkey", fail)]
    with pytest.raises(ServerFailed, match="the disk is full"):
        steps.run_steps(steps_of_start, changes.append, given_up.set)
    ended = {
        change.step: change.status for change in changes if change.status is not StepStatus.STARTED
    }
    assert ended == {"postgres": StepStatus.STOPPED, "valkey": StepStatus.FAILED}


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("LOG: starting\nFATAL:  no shared memory\nLOG: shut down", "FATAL:  no shared memory"),
        ("Traceback:\n  File x\nValueError: no such port\n", "ValueError: no such port"),
        ("initdb: error: no libpq\n\n", "initdb: error: no libpq"),
        ("listening\nbye\n(whole log: /x)", "bye"),
        ("", ""),
    ],
)
def test_the_cause_of_a_failed_start_is_the_last_error_of_its_log(log: str, line: str) -> None:
    assert telling_line(log) == line


def test_a_librarys_error_is_shown_with_its_part_its_type_and_its_first_line() -> None:
    error = TimeoutExpired(["pg_isready"], 60)
    assert steps.as_berth_error("postgres", error).detail == f"postgres: TimeoutExpired: {error}"
    assert (
        steps.as_berth_error("database", RuntimeError("\nfirst\nsecond")).detail
        == "database: RuntimeError: first"
    )


def test_our_own_error_is_shown_as_it_is() -> None:
    error = ServerFailed("valkey ended while starting:\nits log")
    assert steps.as_berth_error("valkey", error) is error


def test_a_failed_step_is_shown_with_the_words_that_are_raised() -> None:
    changes: list[StepProgress] = []

    def fail() -> str:
        raise LookupError("nothing there\nmore")

    with pytest.raises(ServerFailed):
        steps.run_steps([StartStep("database", fail)], changes.append, lambda: None)
    assert [(c.status, c.detail) for c in changes] == [
        (StepStatus.STARTED, ""),
        (StepStatus.FAILED, "database: LookupError: nothing there"),
    ]
