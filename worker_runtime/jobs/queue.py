"""The job queue as a runner sees it: one connection, one round trip a job.

Nothing is retried here. Each method says whether the caller may repeat it after `ValkeyFailed`.
`list_held` finds the claims whose reply was lost.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.manifest import check_reply, publish
from worker_runtime.jobs.protocol.messages import (
    BOOST_MS,
    FAILED_TTL_S,
    FLEET_RESULT_TTL_S,
    MAX_CRASHES,
    RESULT_TTL_S,
    RUNNER_TTL_S,
    JobResult,
    JobStatus,
    read_result,
)
from worker_runtime.jobs.protocol.telemetry import MAX_ERRORS
from worker_runtime.process.valkey import Argument, Valkey
from worker_runtime.protocol.authentication import MessageKeys
from worker_runtime.protocol.keys import ERRORS
from worker_runtime.protocol.scripts import Script

ALL_QUEUES = "*"


@dataclass(frozen=True, slots=True)
class RunnerIdentity:
    """Says who claims. `runner_id` is new after every start; `name` and `node` stay."""

    runner_id: str
    name: str
    node: str
    queues: tuple[str, ...] = (ALL_QUEUES,)
    version: str = ""


class ClaimedJob(msgspec.Struct, frozen=True):
    """Describes one job that this runner holds. `fence` decides whether its end may be written."""

    job_id: str
    body: bytes
    fence: int
    attempt: int
    crashes: int
    #: Milliseconds since it was due; 0 if it was found again after a lost reply.
    waited_ms: int = 0
    #: 1 if further jobs may be prefetched behind
    #: it (`finish_and_claim.lua`); 0 if it was found again.
    plain: int = 0
    #: 1 if it was found again, and someone has cancelled it since it was claimed.
    cancelled: int = 0


class ClaimBatch(msgspec.Struct, frozen=True):
    """The answer to a claim. `due`: seconds until a delayed job is due; None: there is none."""

    status: str
    due: float | None
    jobs: list[ClaimedJob] = msgspec.field(default_factory=list)


class FinishedRun(msgspec.Struct, frozen=True):
    """The end of one run, ready to be written. `delay`: seconds until a retry."""

    job_id: str
    fence: int
    status: JobStatus
    result: bytes
    result_ttl: int = RESULT_TTL_S
    delay: float = 0.0
    crashed: bool = False

    def arguments(self) -> tuple[Argument, ...]:
        """Returns the seven values of one end, as `finish_and_claim.lua` takes them."""
        delay = round(self.delay * 1000)
        return (
            self.job_id,
            self.fence,
            self.status,
            self.result,
            self.result_ttl,
            delay,
            int(self.crashed),
        )


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to a renewal: beats of all runners, by runner id."""

    registered: bool
    suspended: bool = False
    due: float | None = None
    beats: dict[str, bytes] = field(default_factory=dict)


class JobQueue:
    """Makes one runner's calls of the queue. They raise `ValkeyFailed`."""

    def __init__(
        self, client: Valkey, identity: RunnerIdentity, tag: str = job_keys.FLEET_TAG
    ) -> None:
        #: Seconds that the runner's entry lives without a renewal.
        self.runner_ttl = RUNNER_TTL_S
        #: Seconds that a failed job is kept.
        self.failed_ttl = FAILED_TTL_S
        self.client = client
        self.identity = identity
        self.tag = tag
        self._keys = [job_keys.meta(tag)]
        self._queues = ",".join(identity.queues)
        self._claim_number = 0
        #: True if there are other runners, which a claim may have to wake. A wrong guess costs one
        #: check.
        self.others = True

    def join(self) -> None:
        """Registers the runner and loads the scripts. Safe to repeat."""
        identity = self.identity
        self.client.pipeline([("SCRIPT", "LOAD", script.source) for script in job_scripts.ALL])
        about = (
            identity.name,
            identity.node,
            self._queues,
            os.getpid(),
            identity.version,
            self.runner_ttl,
        )
        self._run(job_scripts.JOIN, identity.runner_id, *about)

    def announce(self, manifest: bytes, keys: MessageKeys, application: str) -> bool:
        """Announces the types of an application's runner; False if it is not registered.

        Safe to repeat. Raises `PackageConflict`.
        """
        reply = self.client.run(*publish(self.identity.runner_id, [manifest], keys, application))
        return check_reply(reply)

    def declare(self, settings: Mapping[str, str]) -> None:
        """Sets limits and rates that types declare; '' for none. Safe to repeat."""
        fields = [part for field in settings.items() for part in field]
        if fields:
            self._run(job_scripts.DECLARE, *fields)

    def finish_and_claim(
        self,
        finished: Sequence[FinishedRun],
        max_jobs: int,
        prefetch: int = 0,
        brief: str = "",
        *,
        receiver_limit: int = 0,
        receivers: Mapping[str, int] | None = None,
    ) -> tuple[list[str], ClaimBatch | None]:
        """Writes ends, then claims up to `max_jobs` jobs, in one step.

        Claims up to `prefetch` more if all are plain (see the script) and of the types in `brief`
        (comma separated). The first list says what became of each end: its status, or `gone`. The
        ends may be repeated. The claim is None if nothing was wanted.

        `receiver_limit`: jobs of one receiver that the runner may hold, 0 for no limit;
        `receivers`: how many it holds.
        """
        ends = [value for end in finished for value in end.arguments()]
        self._claim_number += 1
        runner = (self.identity.runner_id, self._claim_number, self.identity.node)
        options = (
            max_jobs,
            int(self.others),
            self._queues,
            prefetch,
            brief,
            self.failed_ttl,
            BOOST_MS,
        )
        limits = (receiver_limit, msgspec.json.encode(receivers) if receivers else "")
        *outcomes, got = self._run(job_scripts.FINISH_AND_CLAIM, *runner, *options, *limits, *ends)
        batch = got and ClaimBatch(
            _text(got[0]), _seconds(got[1]), [_claimed_job(item) for item in got[2:]]
        )
        return [_text(outcome) for outcome in outcomes], batch

    def report_error(self, key: str, text: str) -> None:
        """Queues an error for the operators' alert."""
        entry = ("key", key, "text", text, "count", 1)
        self.client.execute("XADD", ERRORS, "MAXLEN", "~", MAX_ERRORS, "*", *entry)

    def release(self, jobs: Sequence[ClaimedJob]) -> list[str]:
        """Gives back jobs that have not started, as if they had not been claimed. Safe to repeat.

        Says what became of each: `returned`, `cancelled` (the runner has to end it so) or `gone`.
        """
        claims = [value for job in jobs for value in (job.job_id, job.fence)]
        return [
            _text(fate) for fate in self._run(job_scripts.RELEASE, self.identity.runner_id, *claims)
        ]

    def list_held(self) -> list[ClaimedJob] | None:
        """Returns all jobs that the queue says this runner holds; None if it is not registered.
        Safe to repeat.

        A claim that is still under way takes nothing after this.
        """
        self._claim_number += 1
        reply = self._run(job_scripts.LIST_HELD, self.identity.runner_id, self._claim_number)
        return None if reply[0] == b"lost" else [_claimed_job(item) for item in reply[1:]]

    def renew(
        self,
        state: str,
        jobs: Sequence[str],
        ttl: int = RUNNER_TTL_S,
        counted: tuple[int, bytes] = (0, b""),
    ) -> Renewal:
        """Renews the lease and shows `state`; the entry lives for `ttl` seconds. Safe to repeat.

        `counted`, a number and counts, is added to the totals of this tag once for each number.
        """
        about = (self.identity.runner_id, state, ttl, ",".join(jobs))
        reply = self._run(job_scripts.RENEW, *about, self.failed_ttl * 1000, *counted)
        if reply[0] == b"lost":
            return Renewal(registered=False)
        return Renewal(True, reply[1] == b"suspended", _seconds(reply[2]), _beats(reply[3:]))

    def beats(self) -> dict[str, bytes]:
        """Returns the beats of all runners. Safe to repeat."""
        return _beats(self.client.execute("HGETALL", job_keys.beats(self.tag)))

    def reap(self, runner_id: str, beat: bytes) -> dict[str, str] | None:
        """Takes a dead runner's jobs back: job → what became of it; None: it lives. Safe to
        repeat."""
        reply = self._reap(runner_id, beat, 1)
        return None if reply[0] == b"alive" else _fates(reply)

    def sign_off(self) -> dict[str, str]:
        """Removes the runner. Jobs that it still holds go back, or fail if they must not run twice.
        Safe to repeat."""
        return _fates(self._reap(self.identity.runner_id, b"", 0))

    def _reap(self, runner_id: str, beat: bytes, crashes: int) -> Any:
        kept = RESULT_TTL_S if self.tag.startswith("user:") else FLEET_RESULT_TTL_S
        return self._run(
            job_scripts.REAP, runner_id, beat, crashes, MAX_CRASHES, kept, self.failed_ttl
        )

    def write_progress(self, job_id: str, fence: int, progress: bytes) -> bool:
        """Stores a job's progress; false if the job is no longer this runner's. Safe to repeat."""
        return bool(
            self._run(job_scripts.PROGRESS, self.identity.runner_id, job_id, fence, progress)
        )

    def result(self, job_id: str) -> JobResult | None:
        """Returns the stored result. Safe to repeat."""
        stored = self.client.execute("GET", job_keys.result(self.tag, job_id))
        return None if stored is None else read_result(stored)

    def return_ring(self) -> None:
        """Gives a ring of the doorbell back. Safe to repeat."""
        self._run(job_scripts.RING)

    def doorbells(self) -> list[str]:
        """Returns the lists that an idle runner waits on."""
        queues = self.identity.queues
        return [
            job_keys.doorbell(self.tag, "" if queue == ALL_QUEUES else queue) for queue in queues
        ]

    def mailbox(self) -> str:
        return job_keys.mailbox(self.tag, self.identity.runner_id)

    def _run(self, script: Script, *args: Argument) -> Any:
        return self.client.run(script, self._keys, args)


def _claimed_job(item: list[Any]) -> ClaimedJob:
    job_id, *fields = item
    return ClaimedJob(_text(job_id), *fields)


def _seconds(milliseconds: int) -> float | None:
    return None if milliseconds < 0 else milliseconds / 1000


def _beats(pairs: list[bytes]) -> dict[str, bytes]:
    return {_text(runner): beat for runner, beat in zip(pairs[::2], pairs[1::2], strict=True)}


def _fates(reply: list[bytes]) -> dict[str, str]:
    return {_text(job): _text(fate) for job, fate in zip(reply[1::2], reply[2::2], strict=True)}


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
