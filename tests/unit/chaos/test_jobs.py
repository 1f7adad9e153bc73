"""The judge of `berth chaos jobs`: lost, doubled and wrong jobs; which reruns count; what is
frozen."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from math import inf
from pathlib import Path

import psutil
import pytest

from infra.lab.chaos.jobs import ledger
from infra.lab.chaos.jobs.freeze import FrozenProcess, plan_freeze
from infra.lab.chaos.jobs.ledger import (
    JobHarm,
    RecordedExecution,
    RunnerFreeze,
    RunnerKill,
    SentJob,
)
from infra.lab.chaos.jobs.steps import LONG, TRAPS, RunnerStep
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.messages import JobResult, JobStatus
from worker_runtime.protocol.messages import Failure, encode

ONCE, AGAIN = SentJob("j", idempotent=False), SentJob("j", idempotent=True)


def _run(
    attempt: int = 1, at: float = 1.0, *, ended: float | None = None, runner: int = 7
) -> RecordedExecution:
    return RecordedExecution("j", attempt, fence=int(at * 10), runner=runner, at=at, ended=ended)


def _result(status: JobStatus, code: str = "", attempt: int = 1) -> JobResult:
    failure = Failure(code=code, detail="") if code else None
    return JobResult(job_id="j", status=status, failure=failure, attempt=attempt)


def _freeze(at: float, until: float, *, runner: int = 7) -> RunnerFreeze:
    return RunnerFreeze(runner, at, until, RunnerStep.ANY)


def _harms(
    job: SentJob,
    result: JobResult | None,
    *runs: RecordedExecution,
    forgotten: bool = False,
    restarted: bool = False,
) -> list[JobHarm]:
    results = {} if result is None else {"j": result}
    findings = ledger.judge_jobs(
        [job], results, {"j"} if forgotten else set(), runs, {"j"} if restarted else set()
    )
    return [finding.harm for finding in findings]


DONE, UNKNOWN = _result(JobStatus.DONE), _result(JobStatus.FAILED, "JOB_OUTCOME_UNKNOWN")


@pytest.mark.parametrize("job", [ONCE, AGAIN])
def test_a_job_that_ran_once_and_is_done_is_well(job: SentJob) -> None:
    assert _harms(job, DONE, _run(ended=2.0)) == []


def test_a_job_without_an_end_is_lost() -> None:
    assert _harms(AGAIN, None) == [JobHarm.LOST]
    assert _harms(ONCE, None, _run()) == [JobHarm.LOST]


def test_a_job_that_is_done_by_its_result_alone_is_lost() -> None:
    assert _harms(AGAIN, DONE, _run(ended=None)) == [JobHarm.LOST]


def test_two_starts_are_one_too_many_for_a_job_that_must_not_run_twice() -> None:
    twice, done = (_run(), _run(2, 3.0, ended=4.0)), _result(JobStatus.DONE, attempt=2)
    assert _harms(AGAIN, done, *twice) == []
    assert _harms(ONCE, done, *twice) == [JobHarm.DOUBLED]
    assert _harms(ONCE, None, *twice, forgotten=True) == [JobHarm.DOUBLED]


def test_an_unknown_outcome_is_an_end_of_a_job_that_must_not_run_twice_only() -> None:
    assert _harms(ONCE, UNKNOWN, _run()) == []
    assert _harms(AGAIN, UNKNOWN, _run()) == [JobHarm.WRONG]
    assert _harms(ONCE, _result(JobStatus.FAILED, "JOB_FAILED"), _run()) == [JobHarm.WRONG]


def test_a_rerun_counts_from_the_kill_of_the_runner_that_had_the_job() -> None:
    runs = [_run(1, 1.0), _run(2, 3.5, ended=4.0, runner=8)]
    assert ledger.reruns(runs, [RunnerKill(7, 2.0), RunnerKill(9, 3.0)], []) == [1.5]
    assert ledger.reruns(runs, [RunnerKill(7, 2.0)], [(2.5, 3.0)]) == []
    hidden = [_run(1, 1.0), _run(3, 3.5, ended=4.0, runner=8)]
    assert ledger.reruns(hidden, [RunnerKill(7, 2.0)], []) == []


def test_a_job_taken_back_from_a_frozen_runner_is_not_a_rerun_after_its_kill() -> None:
    runs = [_run(1, 1.0), _run(2, 3.5, ended=4.0, runner=8)]
    assert ledger.reruns(runs, [RunnerKill(7, 3.0)], [], [_freeze(1.5, 2.9)]) == []
    # Killed as it stood.
    assert ledger.reruns(runs, [RunnerKill(7, 3.0)], [], [_freeze(1.5, inf)]) == []
    assert ledger.reruns(runs, [RunnerKill(7, 3.0)], [], [_freeze(0.2, 0.9)]) == [0.5]


def test_the_end_of_a_run_that_was_taken_over_is_not_the_end_of_the_job() -> None:
    runs = (_run(1, 1.0, ended=4.0), _run(2, 3.0, ended=5.0, runner=8))
    assert _harms(AGAIN, _result(JobStatus.DONE, attempt=2), *runs) == []
    assert _harms(AGAIN, _result(JobStatus.DONE, attempt=1), *runs) == [JobHarm.WRONG]
    assert _harms(AGAIN, _result(JobStatus.DONE, attempt=1), *runs, restarted=True) == []


def test_a_result_that_is_written_over_is_wrong() -> None:
    assert ledger.changed_results({"j": UNKNOWN}, {"j": UNKNOWN}) == []
    assert ledger.changed_results({"j": UNKNOWN}, {}) == []  # a flush took it
    assert [finding.harm for finding in ledger.changed_results({"j": UNKNOWN}, {"j": DONE})] == [
        JobHarm.WRONG
    ]


def test_late_ends_are_those_of_frozen_runners_that_the_queue_did_not_take() -> None:
    runs = [_run(1, 1.0, ended=1.2), _run(2, 3.0, ended=3.5, runner=8)]
    freezes = [_freeze(1.3, 4.0)]
    assert ledger.late_ends(runs, {"j": _result(JobStatus.DONE, attempt=2)}, freezes) == 1
    assert ledger.late_ends(runs[:1], {"j": UNKNOWN}, freezes) == 1
    assert ledger.late_ends(runs[:1], {"j": DONE}, freezes) == 0
    assert ledger.late_ends(runs[:1], {"j": UNKNOWN}, [_freeze(1.3, 4.0, runner=9)]) == 0


def test_a_job_that_began_after_its_report_as_unknown_began_late() -> None:
    reported = JobResult(
        job_id="j", status=JobStatus.FAILED, failure=UNKNOWN.failure, finished_at_ms=102_000
    )
    assert ledger.begun_late([_run(at=2.5)], {"j": reported}, boot=100.0) == 1
    assert ledger.begun_late([_run(at=1.9)], {"j": reported}, boot=100.0) == 0
    assert ledger.begun_late([_run(at=2.5)], {"j": DONE}, boot=100.0) == 0
    assert ledger.begun_late([_run(at=2.5)], {}, boot=100.0) == 0


def test_spells_are_shorter_and_longer_than_a_lease_and_the_same_for_the_same_seed() -> None:
    plans = [plan_freeze(random.Random(seed), 2.0) for seed in range(200)]  # noqa: S311
    longer = sum(spell.seconds > 2.0 for spell in plans)
    assert 60 < longer < 160
    assert 60 < sum(spell.children for spell in plans) < 140
    assert plans == [plan_freeze(random.Random(seed), 2.0) for seed in range(200)]  # noqa: S311


@pytest.mark.parametrize("children", [False, True])
async def test_a_freeze_stops_a_process_and_on_request_its_children_and_resumes_them(
    children: bool,
) -> None:
    script = "sleep 600 & echo $!; wait"
    process = await asyncio.create_subprocess_shell(script, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    pidfd = os.pidfd_open(process.pid)
    try:
        still = FrozenProcess(process.pid, pidfd)
        await still.begin(children)
        assert await _comes_to(process.pid, stopped=True)
        assert await _comes_to(child, stopped=children)
        still.end()
        assert await _comes_to(process.pid, stopped=False)
        assert await _comes_to(child, stopped=False)
    finally:
        os.close(pidfd)
        os.kill(child, signal.SIGKILL)
        process.kill()
        await process.wait()


async def _comes_to(pid: int, *, stopped: bool) -> bool:
    until = time.monotonic() + 20
    while (psutil.Process(pid).status() == psutil.STATUS_STOPPED) is not stopped:
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.005)
    return True


def test_the_end_of_a_long_job_is_distinguished_from_others() -> None:
    trap, finish = TRAPS[RunnerStep.LONG_END_ASKED], TRAPS[RunnerStep.END_ASKED].request_contains[0]
    assert trap.matches(finish + f" {LONG}7 ".encode())
    assert not trap.matches(finish + b" j7 ")
    assert TRAPS[RunnerStep.END_ASKED].matches(finish + b" j7 ")


def test_the_ledger_is_read_as_the_jobs_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_text(
        "start j 1 5 7 1.000000\nstart k 1 6 7 1.500000\nend k 1 6 7 2.000000\nstart j 1 5 8 "
        "3.000000\n"
    )
    assert ledger.read_executions(path) == [
        RecordedExecution("j", 1, 5, 7, 1.0, None),
        RecordedExecution("k", 1, 6, 7, 1.5, 2.0),
        RecordedExecution("j", 1, 5, 8, 3.0, None),  # the same fence, after a flush
    ]


def test_half_of_a_torn_message_arrives() -> None:
    assert TRAPS[RunnerStep.END_TORN].sent_part(b"*2 EVALSHA") == b"*2 EV"
    assert TRAPS[RunnerStep.END_ASKED].sent_part(b"*2 EVALSHA") == b""


def test_a_claim_is_seen_alone_and_behind_the_ends_of_jobs() -> None:
    claim = job_scripts.FINISH_AND_CLAIM.sha.encode()
    end = encode(JobResult(job_id="j", status=JobStatus.DONE))
    assert TRAPS[RunnerStep.CLAIM_ASKED].matches(claim)
    assert TRAPS[RunnerStep.CLAIM_ASKED].matches(claim + end)
    assert TRAPS[RunnerStep.END_ASKED].matches(claim + end)
    assert not TRAPS[RunnerStep.END_ASKED].matches(claim)
