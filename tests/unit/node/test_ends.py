"""The reason that a worker's end is told with."""

from __future__ import annotations

import pytest

from infra.launchers.port import TaskExit
from infra.node.exits import exit_of_entry
from tests.unit.node.test_register import entry


@pytest.mark.parametrize(
    ("end", "reason", "detail"),
    [
        (exit_of_entry(entry(1), code=0), "exited", {}),
        (exit_of_entry(entry(1), code=7), "exited", {}),
        (exit_of_entry(entry(1), code=None), "exited", {}),
        (exit_of_entry(entry(1), code=-11), "killed", {"signal": "SIGSEGV"}),
        (exit_of_entry(entry(1), code=-40), "killed", {"signal": "SIG40"}),
        (exit_of_entry(entry(1), code=0, stop_reason="idle"), "stopped", {"stop_reason": "idle"}),
        (
            exit_of_entry(entry(1), code=-9, stop_reason="idle", forced=True),
            "stopped",
            {"stop_reason": "idle", "forced": "true", "signal": "SIGKILL"},
        ),
        (
            exit_of_entry(entry(1), code=-9, oom_kills=1),
            "oom_killed",
            {"signal": "SIGKILL", "oom_killed": "true", "oom_kills": "1"},
        ),
        (
            exit_of_entry(entry(1), code=None, oom_kills=2),
            "oom_killed",
            {"oom_killed": "true", "oom_kills": "2"},
        ),
        # A session was killed and replaced at some time; later the worker ended by itself.
        (exit_of_entry(entry(1), code=0, oom_kills=1), "exited", {"oom_killed": "true", "oom_kills": "1"}),
        (exit_of_entry(entry(1), code=None, unseen=True), "lost", {}),
        (
            exit_of_entry(entry(1), code=None, host_restarted=True, stop_reason="idle"),
            "host_restarted",
            {"stop_reason": "idle"},
        ),
    ],
)
def test_an_end_has_one_reason_and_its_facts_beside_it(
    end: TaskExit, reason: str, detail: dict[str, str]
) -> None:
    assert (end.reason, end.detail) == (reason, detail)
    assert (end.task_id, end.worker_id) == ("task-1", "w-1")
