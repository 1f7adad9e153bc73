"""Executes claimed jobs in child processes, and records how each run ended."""

import signal
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from worker_runtime.jobs.child_pool import ChildPool, JobChild, JobRun, NotForked, RunningJobs
from worker_runtime.jobs.child_process import (
    MAX_PROGRESS_BYTES,
    RunOutcome,
    StartRun,
    bounded,
    encode_message,
    read_report,
)
from worker_runtime.jobs.completion import MEMORY_KILLS, PendingRunEnds, RunJudge
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.prefetch import MAX_PREFETCHED_JOBS, PrefetchedJobs, RuntimeEstimate
from worker_runtime.jobs.protocol.messages import Job, JobStatus, read_signed_job
from worker_runtime.jobs.queue import ClaimedJob
from worker_runtime.jobs.registration import RunnerRegistration
from worker_runtime.jobs.types.job_registry import JobRegistry
from worker_runtime.process.clock import Backoff
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import ValkeyFailed
from worker_runtime.protocol.authentication import RefusalCounter
from worker_runtime.protocol.errors import BerthError, InvalidSignature

#: Seconds between two looks at the memory of running jobs.
MEMORY_CHECK_INTERVAL_S = 0.2
#: Children that a job is sent to until one takes it.
_MAX_SENDS = 2


class JobExecutor:
    """Holds all jobs of one runner, from the claim to the end of each run."""

    def __init__(
        self,
        config: RunnerConfig,
        registry: JobRegistry,
        runs: RunningJobs,
        registration: RunnerRegistration,
        log: Log,
        make_pool: Callable[[Callable[[JobChild], None], Callable[[], None]], ChildPool],
    ) -> None:
        """`make_pool` is given what reads a child's packet,
        and what collects children that have ended."""
        self._refused = RefusalCounter()
        self._config = config
        self._registry = registry
        self._runs = runs
        self._registration = registration
        self._log = log
        self.pool = make_pool(self._read_child, self.reap_children)
        self._next_memory_check = 0.0
        #: A fork has failed, and none has succeeded since.
        self._cannot_fork = False
        self.fork_backoff = Backoff(0.25, 5.0)
        self.pending_ends = PendingRunEnds(registration, log, config.message_keys)
        self.prefetched = PrefetchedJobs()
        self.runtime_estimate = RuntimeEstimate()
        #: No further job starts.
        self.stopping = False
        #: Fences of runs that a second signal has killed. The runner holds them until it signs off.
        self._killed: set[int] = set()

    # --- what the runner may claim ----------------------------------------------------------------

    def free_slots(self) -> int:
        """Returns the number of jobs that could be claimed and started now."""
        if self.prefetched or not self._may_start():
            return 0
        return self._config.slots - len(self._runs)

    def prefetch_room(self) -> int:
        """Returns the number of jobs that may be claimed beyond the free slots.

        It is 0 while a job runs whose end others wait for (one that is not plain): that end must be
        written at once.
        """
        if self._config.recycle == 1 or not self._may_start():
            return 0
        if not all(run.claimed.plain for run in self._runs):
            return 0
        return MAX_PREFETCHED_JOBS - len(self.prefetched)

    def receivers(self) -> Counter[str]:
        """Returns how many of the jobs that the runner holds go to each receiver."""
        jobs = [*(run.job for run in self._runs), *self.prefetched.jobs()]
        return Counter(job.receiver for job in jobs if job.receiver)

    def _may_start(self) -> bool:
        if self.stopping or self._registration.suspended:
            return False
        return self.pool.ready and (self.pool.has_spare() or not self._cannot_fork)

    def fences(self) -> set[int]:
        return (
            self._runs.fences()
            | self.pending_ends.fences()
            | self.prefetched.fences()
            | self._killed
        )

    # --- starting jobs ----------------------------------------------------------------------------

    def accept_claim(self, claimed: ClaimedJob) -> None:
        """Starts a job, or keeps it with the prefetched ones if no slot is free or no job may start
        now."""
        job = None
        try:
            job, body = read_signed_job(claimed.body, claimed.job_id, self._config.message_keys)
            claimed = msgspec.structs.replace(claimed, body=body)
            self._registry.check(job)
        except BerthError as error:
            if isinstance(error, InvalidSignature) and self._refused.add(claimed.job_id):
                self._log.error("job_not_authentic", job=claimed.job_id, code=error.code)
            self._refuse(claimed, job, error)
            return
        if claimed.cancelled:
            self._end_as_cancelled(claimed, job)
        elif len(self._runs) < self._config.slots and self._may_start():
            self._start(claimed, job, claimed.waited_ms)
        else:
            self.prefetched.add(claimed, job)

    def start_or_release_prefetched(self) -> None:
        """Starts waiting jobs; gives them back if they wait for too long or must not start now."""
        if not self.prefetched:
            return
        self._start_prefetched()
        if self.stopping or self._registration.suspended:
            self.prefetched.mark_for_release()
        waiting = self.prefetched.to_release()
        if not waiting or not self._registration.reachable:
            return
        try:
            fates = self._registration.queue.release([attempt.claimed for attempt in waiting])
        except ValkeyFailed as error:
            self._registration.drop_connection(error)
            return
        self.prefetched.clear()
        self._log.debug("jobs_given_back", jobs=len(waiting))
        for attempt, fate in zip(waiting, fates, strict=True):
            if fate == "cancelled":
                self._end_as_cancelled(attempt.claimed, attempt.job)

    def _start_prefetched(self) -> None:
        registration = self._registration
        while (
            self.prefetched.may_start()
            and len(self._runs) < self._config.slots
            and self._may_start()
        ):
            # The renewal may show that the runner was suspended, or that it has lost these jobs.
            if not registration.reachable or not registration.ensure_lease(self.stopping):
                return
            if registration.suspended:
                return
            waiting = self.prefetched.pop_next()
            self._start(waiting.claimed, waiting.job, waiting.waited_ms())

    def _start(self, claimed: ClaimedJob, job: Job, waited_ms: int) -> None:
        try:
            child = self._start_run(claimed, job)
        except NotForked as error:
            self._fork_failed(error)
            self._refuse(claimed, job, error)
            return
        self._runs.add(claimed, job, child)
        self._registration.events.log_start(claimed, job)
        self._registration.counters.count_start(job, waited_ms)

    def _start_run(self, claimed: ClaimedJob, job: Job) -> JobChild:
        """Sends a job to a child, or to a second one if the first has just ended. Raises
        `NotForked`, also if the second one has: no process has the job."""
        packet = encode_message(
            StartRun(
                fence=claimed.fence,
                attempt=claimed.attempt,
                job=msgspec.Raw(claimed.body),
                secrets=dict(self.pool.secrets_of(job)),
            )
        )
        for _ in range(_MAX_SENDS):
            child = self.pool.take(job)
            if child.send_job(packet):
                return child
            self._log.warning("job_child_gone", pid=child.pid, job=claimed.job_id)
            self.pool.give_back(child)
        raise NotForked(f"{_MAX_SENDS} processes have ended before they were given the job")

    # --- what is due now and then -----------------------------------------------------------------

    def run_due(self) -> None:
        """Checks the fork server and the memory of running jobs, if this runner has own types."""
        self.pool.run_due()
        if self.pool.manifest_changed and not self.stopping:
            self._log.error(
                "job_types_changed", hint="the code was replaced; the runner ends, start it anew"
            )
            self.stopping = True
        if not self.pool.watches_memory or time.monotonic() < self._next_memory_check:
            return
        self._next_memory_check = time.monotonic() + MEMORY_CHECK_INTERVAL_S
        for run in {run.child: run for run in self._runs}.values():
            if run.kill_reason not in MEMORY_KILLS and self.pool.exceeds_memory(run):
                self._kill_for_memory(run.child)

    def _kill_for_memory(self, child: JobChild) -> None:
        runs = self._runs.runs_in(child)
        for run in runs:
            self._runs.kill_now(run, self._memory_reason(runs, run))

    def _memory_reason(self, runs: list[JobRun], run: JobRun) -> str:
        self._log.warning("job_exceeds_memory", job=run.claimed.job_id, type=run.job.name)
        # With several jobs in the process, nobody knows which of them takes the memory.
        return "memory" if len(runs) == 1 else "process_memory"

    def seconds_until_due(self) -> float:
        """Returns the seconds until `run_due` has something to do."""
        due = self.pool.seconds_until_due()
        if self.pool.watches_memory and self._runs:
            due = min(due, self._next_memory_check - time.monotonic())
        return due

    # --- the spare child --------------------------------------------------------------------------

    def needs_spare_child(self) -> bool:
        """Returns True if a child should be forked ahead of need."""
        is_missing = not self.stopping and self.pool.ready and not self.pool.has_spare()
        return is_missing and self.fork_backoff.due()

    def fork_spare_child(self) -> bool:
        """Forks a child for the next job;
        true if the last fork had failed, so that claims may continue."""
        could_not_fork = self._cannot_fork
        try:
            self.pool.fork_spare()
        except NotForked as error:
            self._fork_failed(error)
            return False
        self.fork_backoff.reset()
        self._cannot_fork = False
        return could_not_fork

    def _fork_failed(self, error: NotForked) -> None:
        """Stops claiming until a spare child exists: each claimed job would lose an attempt."""
        self._log.error("job_child_not_forked", reason=error.detail)
        self.fork_backoff.failed()
        self._cannot_fork = True

    # --- ending jobs ------------------------------------------------------------------------------

    def cancel(self, job_id: str, fence: int) -> None:
        """Cancels a job if the runner holds it: kills its child, or never starts it."""
        if self._runs.cancel(job_id, fence):
            self._log.info("job_cancelling", job=job_id)
        elif waiting := self.prefetched.remove(job_id, fence):
            self._end_as_cancelled(waiting.claimed, waiting.job)

    def kill_running(self) -> None:
        """Kills all running jobs. Signing off decides what becomes of them."""
        self._log.warning("jobs_killed", jobs=len(self._runs))
        self._killed |= self._runs.fences()
        self._runs.kill_all()

    def forget_all(self) -> None:
        """Drops every job, because they belong to other runners or Valkey has lost its data.

        Still sends the ends that are not written yet, and `JOB_OUTCOME_UNKNOWN` for each running
        job that must not run twice. Only a Valkey that has lost its data accepts them.
        """
        lost = [run for run in self._runs if not run.job.idempotent]
        self._runs.kill_all()
        self._killed.clear()
        for run in lost:
            self.pending_ends.add(
                self._judge().died(
                    run.claimed,
                    run.job,
                    kill_reason="",
                    crash_detail="it was lost",
                    output="",
                    started_ms=run.started_ms,
                )
            )
        self.pending_ends.disown()
        self.prefetched.clear()

    def reap_children(self) -> None:
        """Collects children that have ended, after SIGCHLD."""
        for child, status in self.pool.reap():
            self._child_ended(child, status)

    def _read_child(self, child: JobChild) -> None:
        packet = child.receive()
        if packet:
            self._handle_report(child, packet)
        elif packet is not None:  # closed; SIGCHLD will follow
            self.pool.unwatch(child)

    def _handle_report(self, child: JobChild, packet: bytes) -> None:
        try:
            report = read_report(packet)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._log.error("job_child_sent_invalid_packet", pid=child.pid)
            child.kill(signal.SIGKILL)
            return
        run = self._runs.find(child, report.fence)
        if run is None:
            return
        if isinstance(report, RunOutcome):
            self._end_run(run, report)
            return
        if len(report.value) > MAX_PROGRESS_BYTES:
            return
        try:
            if self._registration.reachable:
                self._registration.queue.write_progress(
                    run.claimed.job_id, report.fence, bytes(report.value)
                )
        except ValkeyFailed as error:
            self._registration.drop_connection(error)

    def _end_run(self, run: JobRun, outcome: RunOutcome) -> None:
        child = run.child
        if not run.kill_reason and self.pool.ran_out_of_memory(child):
            self._kill_for_memory(child)  # a process that it had started was killed first
            return
        if run.kill_reason and outcome.failure is not None:
            if child.shared_by:  # the child continues with its other jobs
                self._runs.remove(run)
                self.pool.give_back(child)
                self._add_death(run, "", outcome.output[:MAX_PROGRESS_BYTES])
            return  # the kill caused this failure; the child's end decides
        outcome = bounded(outcome)
        child.capture.read()
        output = outcome.output if child.shared_by else child.capture.text()
        self._runs.remove(run)
        self._settle_child(run, is_last=outcome.last)
        self.runtime_estimate.add_run(run.job.queued_type, outcome.took)
        runner_id = self._registration.runner_id
        self._start_prefetched()
        if self._registration.runner_id != runner_id:
            return  # the runner has lost all its jobs meanwhile, this one included
        self.pending_ends.add(
            self._judge().reported(run.claimed, run.job, outcome, output, run.started_ms)
        )

    def _settle_child(self, run: JobRun, *, is_last: bool) -> None:
        """Gives the child of a run that ended back to the pool. A child that is not shared takes no
        further job if this one was its last, or if it was signalled to end."""
        child = run.child
        if not child.shared_by:  # a shared one ends with its last job, or when it is not needed
            if is_last:
                child.uses = 0
            elif run.kill_reason:
                child.uses = 0  # it has received SIGTERM, which could harm the next job
                self.pool.kill(child)
        self.pool.give_back(child)

    def _child_ended(self, child: JobChild, status: int) -> None:
        while packet := child.receive():  # reports that it sent before it ended
            self._handle_report(child, packet)
        child.capture.read()
        output = child.capture.text()
        if child.not_forked:
            self._fork_failed(NotForked(child.not_forked))
        runs = self._runs.runs_in(child)
        for run in runs:
            self._runs.remove(run)
            if child.not_forked and not run.kill_reason:
                self._refuse(run.claimed, run.job, NotForked(child.not_forked))
                continue
            how = (
                f"its process ended by signal {-status}"
                if status < 0
                else f"its process exited {status}"
            )
            if child.out_of_memory and not run.kill_reason:
                run.kill_reason = self._memory_reason(runs, run)
            self._add_death(run, how, output)
        self.pool.forget(child)

    def _add_death(self, run: JobRun, how: str, output: str) -> None:
        """Records the end of a run that was killed, or whose child has died."""
        end = self._judge().died(
            run.claimed,
            run.job,
            kill_reason=run.kill_reason,
            crash_detail=how,
            output=output,
            started_ms=run.started_ms,
        )
        self.pending_ends.add(end)
        if end.result.status is JobStatus.FAILED and run.kill_reason:
            self._log.warning("job_killed", job=run.claimed.job_id, why=run.kill_reason)

    def _refuse(self, claimed: ClaimedJob, job: Job | None, error: BerthError) -> None:
        self.pending_ends.add(self._judge().refused(claimed, job, error))

    def _end_as_cancelled(self, claimed: ClaimedJob, job: Job) -> None:
        self.pending_ends.add(self._judge().cancelled(claimed, job))

    def _judge(self) -> RunJudge:
        return RunJudge(self._registration.runner_id)
