"""The reason that a worker's end is told with."""

from __future__ import annotations

import pytest

from infra.launchers.port import TaskExit
from infra.node.ends import told
from tests.unit.node.test_register import entry


@pytest.mark.parametrize(
    ("end", "reason", "detail"),
    [
        (told(entry(1), code=0), "exited", {}),
        (told(entry(1), code=7), "exited", {}),
        (told(entry(1), code=None), "exited", {}),
        (told(entry(1), code=-11), "killed", {"signal": "SIGSEGV"}),
        (told(entry(1), code=-40), "killed", {"signal": "SIG40"}),
        (told(entry(1), code=0, stop_reason="idle"), "stopped", {"stop_reason": "idle"}),
        (
            told(entry(1), code=-9, stop_reason="idle", forced=True),
            "stopped",
            {"stop_reason": "idle", "forced": "true", "signal": "SIGKILL"},
        ),
        (
            told(entry(1), code=-9, oom_kills=1),
            "oom_killed",
            {"signal": "SIGKILL", "oom_killed": "true", "oom_kills": "1"},
        ),
        (told(entry(1), code=None, oom_kills=2), "oom_killed", {"oom_killed": "true", "oom_kills": "2"}),
        # A session was killed and replaced at some time; later the worker ended by itself.
        (told(entry(1), code=0, oom_kills=1), "exited", {"oom_killed": "true", "oom_kills": "1"}),
        (told(entry(1), code=None, unseen=True), "lost", {}),
        (
            told(entry(1), code=None, host_restarted=True, stop_reason="idle"),
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
