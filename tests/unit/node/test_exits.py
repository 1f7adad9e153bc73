"""A worker's exit has one reason, and its facts."""

from __future__ import annotations

from typing import Any

import pytest

from infra.worker_task import TaskExit, worker_exit


def ended(**facts: Any) -> TaskExit:
    return worker_exit("task-1", "w-1", at=1.0, **facts)


@pytest.mark.parametrize(
    ("end", "reason", "detail"),
    [
        (ended(code=0), "exited", {}),
        (ended(code=7), "exited", {}),
        (ended(code=None), "exited", {}),
        (ended(code=-11), "killed", {"signal": "SIGSEGV"}),
        (ended(code=-40), "killed", {"signal": "SIG40"}),
        (ended(code=0, stop_reason="idle"), "stopped", {"stop_reason": "idle"}),
        (
            ended(code=-9, stop_reason="idle", forced=True),
            "stopped",
            {"stop_reason": "idle", "forced": "true", "signal": "SIGKILL"},
        ),
        (
            ended(code=-9, oom_killed=True, detail={"oom_kills": "1"}),
            "oom_killed",
            {"signal": "SIGKILL", "oom_killed": "true", "oom_kills": "1"},
        ),
        (
            ended(code=None, oom_killed=True, detail={"oom_kills": "2"}),
            "oom_killed",
            {"oom_killed": "true", "oom_kills": "2"},
        ),
        (
            ended(code=-9, oom_killed=True, stopped=True),
            "stopped",
            {"signal": "SIGKILL", "oom_killed": "true"},
        ),
        (ended(code=71), "exited", {}),
        # A session was killed and replaced at some time; later the worker ended by itself.
        (
            ended(code=0, oom_killed=True, detail={"oom_kills": "1"}),
            "exited",
            {"oom_killed": "true", "oom_kills": "1"},
        ),
        (ended(code=None, seen=False), "lost", {}),
        (
            ended(code=None, reason="host_restarted", stop_reason="idle"),
            "host_restarted",
            {"stop_reason": "idle"},
        ),
    ],
)
def test_an_exit_has_one_reason_and_the_facts_next_to_it(
    end: TaskExit, reason: str, detail: dict[str, str]
) -> None:
    assert (end.reason, end.detail) == (reason, detail)
    assert (end.task_id, end.worker_id) == ("task-1", "w-1")
