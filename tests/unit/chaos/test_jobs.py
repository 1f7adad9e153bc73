"""The judge of `berth chaos jobs`: what it calls lost, doubled and wrong; and which reruns count."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.chaos.jobbing import ledger
from infra.chaos.jobbing.ledger import Execution, Harm, Kill, Sent
from infra.chaos.jobbing.steps import before
from worker_runtime.protocol.job_messages import JobResult, JobStatus
from worker_runtime.protocol.messages import Failure

ONCE, AGAIN = Sent("j", idempotent=False), Sent("j", idempotent=True)


def _run(attempt: int = 1, at: float = 1.0, *, ended: float | None = None, runner: int = 7) -> Execution:
    return Execution("j", attempt, fence=int(at * 10), runner=runner, at=at, ended=ended)


def _result(status: JobStatus, code: str = "") -> JobResult:
    failure = Failure(code=code, detail="") if code else None
    return JobResult(job_id="j", status=status, failure=failure)


def _harms(job: Sent, result: JobResult | None, *runs: Execution, forgotten: bool = False) -> list[Harm]:
    results = {} if result is None else {"j": result}
    found = ledger.judge([job], results, {"j"} if forgotten else set(), runs)
    return [finding.harm for finding in found]


DONE, UNKNOWN = _result(JobStatus.DONE), _result(JobStatus.FAILED, "JOB_OUTCOME_UNKNOWN")


@pytest.mark.parametrize("job", [ONCE, AGAIN])
def test_a_job_that_ran_once_and_is_done_is_well(job: Sent) -> None:
    assert _harms(job, DONE, _run(ended=2.0)) == []


def test_a_job_without_an_end_is_lost() -> None:
    assert _harms(AGAIN, None) == [Harm.LOST]
    assert _harms(ONCE, None, _run()) == [Harm.LOST]


def test_a_job_that_is_done_by_its_result_alone_is_lost() -> None:
    assert _harms(AGAIN, DONE, _run(ended=None)) == [Harm.LOST]


def test_two_starts_are_one_too_many_for_a_job_that_must_not_run_twice() -> None:
    twice = (_run(), _run(2, 3.0, ended=4.0))
    assert _harms(AGAIN, DONE, *twice) == []
    assert _harms(ONCE, DONE, *twice) == [Harm.DOUBLED]
    assert _harms(ONCE, None, *twice, forgotten=True) == [Harm.DOUBLED]


def test_an_unknown_outcome_is_an_end_of_a_job_that_must_not_run_twice_only() -> None:
    assert _harms(ONCE, UNKNOWN, _run()) == []
    assert _harms(AGAIN, UNKNOWN, _run()) == [Harm.WRONG]
    assert _harms(ONCE, _result(JobStatus.FAILED, "JOB_FAILED"), _run()) == [Harm.WRONG]


def test_a_rerun_counts_from_the_kill_of_the_runner_that_had_the_job() -> None:
    runs = [_run(1, 1.0), _run(2, 3.5, ended=4.0, runner=8)]
    assert ledger.reruns(runs, [Kill(7, 2.0), Kill(9, 3.0)], []) == [1.5]
    assert ledger.reruns(runs, [Kill(7, 2.0)], [(2.5, 3.0)]) == []
    hidden = [_run(1, 1.0), _run(3, 3.5, ended=4.0, runner=8)]
    assert ledger.reruns(hidden, [Kill(7, 2.0)], []) == []


def test_the_ledger_is_read_as_the_jobs_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_text("start j 1 5 7 1.000000\nstart k 1 6 7 1.500000\nend k 1 6 7 2.000000\n")
    assert ledger.read(path) == [
        Execution("j", 1, 5, 7, 1.0, None),
        Execution("k", 1, 6, 7, 1.5, 2.0),
    ]


def test_a_torn_message_keeps_its_whole_commands() -> None:
    message = b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n*2\r\n$3\r\nGET\r\n$1\r\nb\r\n"
    assert before(message, b"$1\r\nb") == b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n"
    assert before(message, b"$1\r\na") == b""
    assert before(message, b"") == b""
