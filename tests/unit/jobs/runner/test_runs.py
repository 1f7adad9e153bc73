from __future__ import annotations

from typing import Any, cast

import pytest

from worker_runtime.jobs.children.child_pool import JobChild
from worker_runtime.jobs.children.runs import JobRun
from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.jobs.queue import ClaimedJob


def run(claimed: dict[str, Any], **job: Any) -> JobRun:
    fields = {"job_id": "j", "name": "n", "idempotent": True, **job}
    of_claim = {"job_id": "j", "body": b"", "fence": 1, "attempt": 1, "crashes": 0, **claimed}
    return JobRun(ClaimedJob(**of_claim), Job(**fields), cast(JobChild, None), 0, 0.0)


@pytest.mark.parametrize(
    ("claimed", "job"),
    [
        ({}, {"idempotent": False}),
        ({}, {"group": "g"}),
        ({}, {"unique": "u"}),
        ({"limited": 1}, {}),
        ({"crashes": 1}, {}),
    ],
    ids=["must not run twice", "its group waits", "its key is taken", "its limit is taken", "crashed before"],
)
def test_the_end_of_a_run_that_others_wait_for_is_written_at_once(
    claimed: dict[str, Any], job: dict[str, Any]
) -> None:
    assert run({}).plain
    assert not run(claimed, **job).plain
