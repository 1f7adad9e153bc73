"""The job queue as a runner sees it: one connection, one round trip a job.

Nothing is repeated here. What a caller may repeat after `ValkeyFailed` stands at each method; claims whose
reply was lost are found again with `held`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.messages import (
    BOOST_MS,
    FAILED_TTL,
    RESULT_TTL,
    JobResult,
    JobStatus,
    read_result,
)
from worker_runtime.process.valkey import (
    Argument,
    Command,
    Valkey,
    evalsha,
    is_unknown_script,
    raise_if_error,
)
from worker_runtime.protocol.scripts import Script

#: Jobs that died, or whose runner died, this often are not run again.
MAX_CRASHES = 3
#: Seconds that a runner's entry lives without a renewal (requirement J4).
RUNNER_TTL = 420
ALL_QUEUES = "*"


@dataclass(frozen=True, slots=True)
class RunnerIdentity:
    """Who claims: `runner_id` is another one after every start, `name` and `node` last."""

    runner_id: str
    name: str
    node: str
    queues: tuple[str, ...] = (ALL_QUEUES,)
    version: str = ""


class ClaimedJob(msgspec.Struct, frozen=True):
    """One job in hand. `fence` decides whether its end may be written."""

    job_id: str
    body: bytes
    fence: int
    attempt: int
    crashes: int
    #: Since it was due; 0 if it was found again after a lost reply.
    waited_ms: int = 0
    #: 1 if its type had a limit then; 0 if it was found again.
    limited: int = 0
    #: 1 if it was found again, and someone has cancelled it since it was claimed.
    cancelled: int = 0


class ClaimBatch(msgspec.Struct, frozen=True):
    """The answer to a claim. `due` is in seconds; None: nothing is delayed."""

    status: str
    due: float | None
    jobs: list[ClaimedJob] = msgspec.field(default_factory=list)


class FinishedRun(msgspec.Struct, frozen=True):
    """The end of one run, ready to be written. `delay` in seconds, of a retry."""

    job_id: str
    fence: int
    status: JobStatus
    result: bytes
    result_ttl: int = RESULT_TTL
    delay: float = 0.0
    crashed: bool = False

    def arguments(self) -> tuple[Argument, ...]:
        """As `finish_all` of the scripts takes them."""
        delay = round(self.delay * 1000)
        return self.job_id, self.fence, self.status, self.result, self.result_ttl, delay, int(self.crashed)


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to a renewal: beats of all runners, by runner id."""

    registered: bool
    suspended: bool = False
    due: float | None = None
    beats: dict[str, bytes] = field(default_factory=dict)


class JobQueue:
    """One runner's calls. Raises `ValkeyFailed`."""

    def __init__(self, client: Valkey, identity: RunnerIdentity, tag: str = job_keys.FLEET_TAG) -> None:
        self.client = client
        self.identity = identity
        self.tag = tag
        self._keys = [job_keys.meta(tag)]
        self._queues = ",".join(identity.queues)
        self._number = 0
        #: Number of the last `held`: what older claims took stood in its reply, or they take nothing.
        self._told = 0
        #: Whether other runners are there, which a claim may have to wake. A wrong guess costs a look.
        self.others = True

    def join(self) -> None:
        """Registers the runner and makes the scripts known. Safe to repeat."""
        identity = self.identity
        self.client.pipeline([("SCRIPT", "LOAD", script.source) for script in job_scripts.ALL])
        about = (identity.name, identity.node, self._queues, os.getpid(), identity.version, RUNNER_TTL)
        self._run(job_scripts.JOIN, identity.runner_id, *about)

    def turn(
        self, finishes: Sequence[FinishedRun], want: int, ahead: int = 0, brief: str = ""
    ) -> tuple[list[str], ClaimBatch | None]:
        """Writes ends, then claims up to `want` jobs (0: none), in one step; up to `ahead` more if all are
        plain (`claiming.lua`), of types in `brief` (comma separated).

        The first list says what became of each end: its status, or `gone`. The ends may be repeated.
        """
        ends = [value for finish in finishes for value in finish.arguments()]
        runner = self.identity.runner_id
        if want <= 0 and ahead <= 0:
            outcomes = self._run(job_scripts.FINISH, runner, FAILED_TTL, BOOST_MS, *ends)
            return [_text(outcome) for outcome in outcomes], None
        self._number += 1
        about = (self.identity.node, want, int(self.others), self._queues, ahead, brief)
        claim = (runner, self._number, *about)
        if not finishes:
            return [], _claims(self._run(job_scripts.CLAIM, *claim))
        *outcomes, claimed = self._run(job_scripts.FINISH_AND_CLAIM, *claim, FAILED_TTL, BOOST_MS, *ends)
        return [_text(outcome) for outcome in outcomes], _claims(claimed)

    def claim_later(self, brief: str) -> tuple[int, Command]:
        """A claim of one plain job (`claiming.lua`), to be sent behind a call that blocks; and its number."""
        self._number += 1
        about = (self.identity.node, 0, int(self.others), self._queues, 1, brief, 1)
        return self._number, evalsha(
            job_scripts.CLAIM, self._keys, (self.identity.runner_id, self._number, *about)
        )

    def claimed(self, number: int, reply: Any) -> ClaimBatch | None:
        """What such a claim brought. None: nothing, or `held` has told of it since."""
        if number < self._told or is_unknown_script(reply):
            return None
        return _claims(raise_if_error(reply))

    def release(self, jobs: Sequence[ClaimedJob]) -> list[str]:
        """Gives jobs back that have not begun, as if they had not been claimed. Safe to repeat.

        What became of each: `returned`, `cancelled` (it is to be ended so) or `gone`.
        """
        claims = [value for job in jobs for value in (job.job_id, job.fence)]
        return [_text(fate) for fate in self._run(job_scripts.RELEASE, self.identity.runner_id, *claims)]

    def held(self) -> list[ClaimedJob] | None:
        """Everything in hand by the queue's account; None: not registered any more. Safe to repeat.

        No claim that is still under way takes anything after this.
        """
        self._number += 1
        self._told = self._number
        reply = self._run(job_scripts.LIST_HELD, self.identity.runner_id, self._number)
        return None if reply[0] == b"lost" else [_job(item) for item in reply[1:]]

    def renew(
        self, state: str, jobs: Sequence[str], ttl: int = RUNNER_TTL, counted: tuple[int, bytes] = (0, b"")
    ) -> Renewal:
        """Renews the lease and shows `state`; the entry lives for `ttl` seconds. Safe to repeat.

        `counted` goes into the totals, once for each number: those of the fleet, or of all users together.
        """
        if self.tag != job_keys.FLEET_TAG and counted[1]:
            where = [job_keys.meta(job_keys.FLEET_TAG)]
            self.client.run(job_scripts.COUNT, where, (self.identity.runner_id, *counted))
            counted = (0, b"")
        about = (self.identity.runner_id, state, ttl, ",".join(jobs))
        reply = self._run(job_scripts.RENEW, *about, FAILED_TTL * 1000, *counted)
        if reply[0] == b"lost":
            return Renewal(registered=False)
        beats = {_text(runner): beat for runner, beat in zip(reply[3::2], reply[4::2], strict=True)}
        return Renewal(True, reply[1] == b"suspended", _seconds(reply[2]), beats)

    def beats(self) -> dict[str, bytes]:
        """The beats of all runners. Safe to repeat."""
        reply = self.client.execute("HGETALL", job_keys.beats(self.tag))
        return {_text(runner): beat for runner, beat in zip(reply[::2], reply[1::2], strict=True)}

    def reap(self, runner_id: str, beat: bytes) -> dict[str, str] | None:
        """Takes a dead runner's jobs back: job → what became of it; None: it lives. Safe to repeat."""
        reply = self._run(job_scripts.REAP, runner_id, beat, 1, MAX_CRASHES, RESULT_TTL, FAILED_TTL)
        return None if reply[0] == b"alive" else _pairs(reply)

    def leave(self) -> dict[str, str]:
        """Signs off. Jobs still in hand go back, or fail if they must not run twice. Safe to repeat."""
        own = self.identity.runner_id
        return _pairs(self._run(job_scripts.REAP, own, b"", 0, MAX_CRASHES, RESULT_TTL, FAILED_TTL))

    def progress(self, job_id: str, fence: int, progress: bytes) -> bool:
        """Notes how far a job is; false if it is no longer ours. Safe to repeat."""
        return bool(self._run(job_scripts.PROGRESS, self.identity.runner_id, job_id, fence, progress))

    def result(self, job_id: str) -> JobResult | None:
        """The stored result. Safe to repeat."""
        stored = self.client.execute("GET", job_keys.result(self.tag, job_id))
        return None if stored is None else read_result(stored)

    def ring(self) -> None:
        """Gives a ring of the bell back. Safe to repeat."""
        self._run(job_scripts.RING)

    def bells(self) -> list[str]:
        """What an idle runner waits on."""
        queues = self.identity.queues
        return [job_keys.bell(self.tag, "" if queue == ALL_QUEUES else queue) for queue in queues]

    def mail(self) -> str:
        return job_keys.mailbox(self.tag, self.identity.runner_id)

    def _run(self, script: Script, *args: Argument) -> Any:
        return self.client.run(script, self._keys, args)


def _claims(reply: list[Any]) -> ClaimBatch:
    return ClaimBatch(_text(reply[0]), _seconds(reply[1]), [_job(item) for item in reply[2:]])


def _job(item: list[Any]) -> ClaimedJob:
    job_id, body, fence, attempt, crashes, *waited = item
    return ClaimedJob(_text(job_id), body, fence, attempt, crashes, *waited)


def _seconds(milliseconds: int) -> float | None:
    return None if milliseconds < 0 else milliseconds / 1000


def _pairs(reply: list[bytes]) -> dict[str, str]:
    return {_text(job): _text(what) for job, what in zip(reply[1::2], reply[2::2], strict=True)}


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
