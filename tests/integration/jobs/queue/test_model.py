"""Any sequence of what producers, runners and operators do, against the model of `model.py`."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.jobs.queue import KEYS, QueueHarness, claim, die, end, ending
from tests.support.jobs.queue_model import ModelJob, ModelQueue
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import JobStatus
from worker_runtime.jobs.queue import ClaimedJob, JobQueue

FLEET = job_keys.FLEET_TAG
HOUR = 3600.0
QUEUES = ("a", "b", "scheduler")
NAMES = ("mail", "export")
#: Queue, type, priority, idempotent, unique key, group, delayed.
JOBS = st.tuples(
    st.sampled_from(QUEUES),
    st.sampled_from(NAMES),
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from(("", "", "", "u1")),
    st.sampled_from(("", "", "", "g1", "g2")),
    st.sampled_from((False, False, False, True)),
)


class Machine(RuleBasedStateMachine):
    """Two runners, three queues, a limit of two exports, and everything that may happen to a
    job."""

    def __init__(self, harness: QueueHarness) -> None:
        super().__init__()
        self.harness = harness
        self.model = ModelQueue(limits={"export": 2}, weights={"a": 2})
        self.count = 0
        self.last_score: dict[tuple[str, int], float] = {}

    @initialize()
    def start(self) -> None:
        self.harness.client.execute("FLUSHALL")
        self.harness.setting(job_calls.limit_field("export"), 2)
        self.harness.setting(job_calls.weight_field("a"), 2)
        self.runners = [self.harness.runner("one"), self.harness.runner("two")]
        #: Runners that have not claimed since they joined: they will do so without a ring.
        self.fresh = {runner.identity.runner_id for runner in self.runners}
        self.held: list[tuple[JobQueue, ClaimedJob]] = []
        self.stale: list[tuple[JobQueue, ClaimedJob]] = []

    @rule(jobs=st.lists(JOBS, min_size=1, max_size=6))
    def enqueue(self, jobs: list[tuple[str, str, int, bool, str, str, bool]]) -> None:
        for job in jobs:
            self._enqueue(*job)

    @rule(which=st.integers(0, 1), times=st.integers(1, 4))
    def claim(self, which: int, times: int) -> None:
        for _ in range(times):
            self._claim(self.runners[which])

    @rule(which=st.integers(0, 1), want=st.integers(0, 1), extra=st.integers(1, 4))
    def prefetch(self, which: int, want: int, extra: int) -> None:
        runner = self.runners[which]
        if want:  # else it is busy, and listens to no bell
            self.harness.client.execute("DEL", *runner.doorbells(), runner.mailbox())
            self.fresh.discard(runner.identity.runner_id)
        claims = runner.finish_and_claim([], want, extra, ",".join(NAMES))[1]
        assert claims is not None
        taken = list(claims.jobs)
        plain = True
        for number in range(want + extra):
            expected = self.model.expected()
            plain = plain and (expected is None or self.model.plain(expected))
            if expected is None or (number >= want and not plain):
                break
            assert taken, f"{expected} was not taken"
            self._took(runner, taken.pop(0), expected)
        assert taken == []

    @rule(which=st.integers(0, 1))
    def list_held(self, which: int) -> None:
        runner = self.runners[which]
        listed = {(job.job_id, job.fence) for job in runner.list_held() or []}
        assert listed == {(job.job_id, job.fence) for holder, job in self.held if holder is runner}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        runner = data.draw(st.sampled_from([runner for runner, _ in self.held]))
        mine = [job for holder, job in self.held if holder is runner]
        back = data.draw(
            st.lists(st.sampled_from(mine), min_size=1, unique_by=lambda job: job.job_id)
        )
        for job, fate in zip(back, runner.release(back), strict=True):
            assert fate == self.model.given_back(self.model.jobs[job.job_id])
            if fate == "returned":
                self.held.remove((runner, job))
                self.stale.append((runner, job))

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def give_back_too_late(self, data: st.DataObject) -> None:
        runner, job = data.draw(st.sampled_from(self.stale))
        assert runner.release([job]) == ["gone"]

    def _enqueue(
        self,
        queue: str,
        name: str,
        priority: int,
        idempotent: bool,
        unique: str,
        group: str,
        delayed: bool,
    ) -> None:
        self.count += 1
        job = ModelJob(f"j{self.count}", name, queue, idempotent, unique, group, delayed=delayed)
        status = self.harness.enqueue(
            job.job_id,
            name,
            queue=queue,
            priority=priority,
            idempotent=idempotent,
            unique=unique,
            group=group,
            delay=HOUR if delayed else 0.0,
        )
        if self.model.holder(unique):
            assert status == "duplicate"
            return
        assert status == "queued"
        job.score = self._score(job.job_id)
        if not delayed:  # first in, first out within a priority
            assert job.score > self.last_score.get((queue, priority), -1e18)
            self.last_score[queue, priority] = job.score
        self.model.add(job)

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data())
    def enqueue_again(self, data: st.DataObject) -> None:
        known = [*self.model.jobs, *self.model.ended]
        assert self.harness.enqueue(data.draw(st.sampled_from(known))) == "seen"

    def _claim(self, runner: JobQueue) -> None:
        expected = self.model.expected()
        # An idle runner has taken its ring and its mail before it claims.
        self.harness.client.execute("DEL", *runner.doorbells(), runner.mailbox())
        self._taken(runner, claim(runner), expected)

    def _taken(self, runner: JobQueue, jobs: list[ClaimedJob], expected: str | None) -> None:
        self.fresh.discard(runner.identity.runner_id)
        assert [job.job_id for job in jobs] == ([expected] if expected else [])
        if expected:
            self._took(runner, jobs[0], expected)

    def _took(self, runner: JobQueue, job: ClaimedJob, expected: str) -> None:
        assert job.job_id == expected
        self.model.claimed(expected, runner.identity.runner_id)
        model = self.model.jobs[expected]
        assert (job.attempt, job.crashes) == (model.attempt, model.crashes)
        assert all(job.fence > other.fence for _, other in self.held)
        self.held.append((runner, job))

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        status=st.sampled_from(JobStatus),
        later=st.booleans(),
        crashed=st.booleans(),
        next_too=st.booleans(),
    )
    def finish(
        self, data: st.DataObject, status: JobStatus, later: bool, crashed: bool, next_too: bool
    ) -> None:
        runner, job = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        model = self.model.jobs[job.job_id]
        ended = ending(job, status, delay=HOUR if later else 0.0, crashed=crashed)
        (outcome,), claims = runner.finish_and_claim([ended], int(next_too))
        if status is JobStatus.RETRY:
            if not model.cancelled:
                model.score = self._score(job.job_id)
            assert outcome == self.model.retried(model, later, crashed)
        else:
            assert outcome == status.value
            self.model.end(model, status.value)
        self.stale.append((runner, job))
        if claims is not None:
            self._taken(runner, claims.jobs, self.model.expected())

    @precondition(lambda self: self.stale)
    @rule(data=st.data(), status=st.sampled_from(JobStatus))
    def finish_too_late(self, data: st.DataObject, status: JobStatus) -> None:
        runner, job = data.draw(st.sampled_from(self.stale))
        assert end(runner, job, status) == "gone"

    @rule(which=st.integers(0, 1))
    def runner_dies(self, which: int) -> None:
        dead, finder = self.runners[which], self.runners[1 - which]
        assert die(dead, finder) == self.model.died(dead.identity.runner_id)
        self.stale += [(runner, job) for runner, job in self.held if runner is dead]
        self.held = [(runner, job) for runner, job in self.held if runner is not dead]
        self.runners[which] = self.harness.runner(dead.identity.name)
        self.fresh.discard(dead.identity.runner_id)
        self.fresh.add(self.runners[which].identity.runner_id)

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = self.model.jobs[data.draw(st.sampled_from(sorted(self.model.jobs)))]
        outcome = self.harness.call(job_calls.cancel(job.job_id, KEYS))
        if job.state == "running":
            assert outcome == "asked"
            job.cancelled = True
        elif job.state == "failed":
            assert outcome == "failed"
            self.model.forgotten(job)
        else:
            assert outcome == "cancelled"
            self.model.end(job, "cancelled")

    @precondition(lambda self: any(job.delayed for job in self.model.jobs.values()))
    @rule(data=st.data())
    def time_passes(self, data: st.DataObject) -> None:
        late = sorted(job.job_id for job in self.model.jobs.values() if job.delayed)
        job = self.model.jobs[data.draw(st.sampled_from(late))]
        self.harness.make_due(job.job_id)
        self.runners[0].renew("idle", [])
        self.model.due(job)

    @precondition(lambda self: any(job.state == "failed" for job in self.model.jobs.values()))
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        failed = sorted(job.job_id for job in self.model.jobs.values() if job.state == "failed")
        job = self.model.jobs[data.draw(st.sampled_from(failed))]
        back = self.harness.call(job_calls.requeue([job.job_id]))
        if self.model.holder(job.unique):
            assert back == []
        else:
            assert back == [job.job_id]
            job.score = self._score(job.job_id)
            self.model.requeued(job)

    @rule(queue=st.sampled_from(QUEUES))
    def suspend_or_resume(self, queue: str) -> None:
        if queue in self.model.halted:
            self.harness.call(job_calls.resume(queue=queue))
            self.model.halted.remove(queue)
        else:
            self.harness.call(job_calls.suspend(queue=queue))
            self.model.halted.add(queue)

    @invariant()
    def every_job_is_in_one_place(self) -> None:
        states = {job_id: self.harness.field(job_id, "state") for job_id in self.model.jobs}
        assert states == {job.job_id: job.state for job in self.model.jobs.values()}

    @invariant()
    def what_runs_is_what_is_held(self) -> None:
        held = sorted(job.job_id for job in self.model.jobs.values() if job.state == "running")
        assert held == sorted(job.job_id for _, job in self.held)
        for name in NAMES:
            counted = self.harness.client.execute("HGET", job_keys.running(FLEET, name), "n")
            assert int(counted or 0) == self.model.running(name)

    @invariant()
    def a_unique_key_belongs_to_a_job_that_lives(self) -> None:
        owner = self.harness.client.execute("GET", job_keys.unique(FLEET, "u1"))
        assert (owner.decode() if owner else None) == self.model.holder("u1")

    @invariant()
    def what_can_run_wakes_an_idle_runner(self) -> None:
        if self.model.expected():
            rung = self.harness.client.execute("LLEN", job_keys.doorbell(FLEET))
            told = [
                self.harness.client.execute("LLEN", runner.mailbox()) for runner in self.runners
            ]
            assert rung == 1 or any(told) or self.fresh

    def _score(self, job_id: str) -> float:
        return float(self.harness.field(job_id, "score") or 0)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_queue_does_what_its_model_does(harness: QueueHarness) -> None:
    run_state_machine_as_test(
        cast(Any, lambda: Machine(harness)),
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        ),
    )
