"""The steps of a runner at which it is killed or frozen, as the proxy sees them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.protocol.scripts import Script


class RunnerStep(StrEnum):
    """At "asked" steps the request never arrives.
    At the others it takes effect, and the reply is lost."""

    JOIN_ASKED = "join asked"
    JOINED = "joined"
    CLAIM_ASKED = "claim asked"
    CLAIMED = "claimed"
    #: Some milliseconds after the claim.
    RUNNING = "running"
    END_ASKED = "end asked"
    #: Half of the request arrives.
    END_TORN = "end torn"
    ENDED = "ended"
    #: As `END_ASKED`, of a long job: when its end arrives, it may be running a second time.
    LONG_END_ASKED = "long end asked"
    #: The release of prefetched jobs.
    RETURN_ASKED = "return asked"
    RETURNED = "returned"
    RENEW_ASKED = "renew asked"
    RENEWED = "renewed"
    #: At a random time.
    ANY = "any moment"
    #: Some time after a freeze. It has no trap: every frozen runner is killed so.
    THAWED = "thawed"


@dataclass(frozen=True)
class StepTrap:
    """Says what a request and its reply contain if the trap is to spring."""

    #: The request contains one of these.
    request_contains: tuple[bytes, ...]
    before: bool
    reply_contains: bytes = b""
    #: Half of the request still arrives.
    torn: bool = False
    #: The request contains this, too.
    job_contains: bytes = b""

    def matches(self, message: bytes) -> bool:
        return (
            any(word in message for word in self.request_contains) and self.job_contains in message
        )

    def sent_part(self, message: bytes) -> bytes:
        """Returns the part that still arrives before the trap springs."""
        return message[: len(message) // 2] if self.torn else b""


def _runs(script: Script) -> tuple[bytes, ...]:
    return (script.sha.encode(),)


#: The beginning of a long job's id.
LONG = "long"
_CLAIMS = _runs(job_scripts.FINISH_AND_CLAIM)
#: In the same call, if it writes the end of a job.
_ENDS = (b'"type":"job_result"',)
#: In the reply to a claim that brings jobs.
_JOBS = b"$4\r\njobs\r\n"
TRAPS = {
    RunnerStep.JOIN_ASKED: StepTrap(_runs(job_scripts.JOIN), before=True),
    RunnerStep.JOINED: StepTrap(_runs(job_scripts.JOIN), before=False),
    RunnerStep.CLAIM_ASKED: StepTrap(_CLAIMS, before=True),
    RunnerStep.CLAIMED: StepTrap(_CLAIMS, before=False, reply_contains=_JOBS),
    RunnerStep.RUNNING: StepTrap(_CLAIMS, before=False, reply_contains=_JOBS),
    RunnerStep.END_ASKED: StepTrap(_ENDS, before=True),
    RunnerStep.END_TORN: StepTrap(_ENDS, before=True, torn=True),
    RunnerStep.ENDED: StepTrap(_ENDS, before=False),
    RunnerStep.LONG_END_ASKED: StepTrap(_ENDS, before=True, job_contains=LONG.encode()),
    RunnerStep.RETURN_ASKED: StepTrap(_runs(job_scripts.RELEASE), before=True),
    RunnerStep.RETURNED: StepTrap(_runs(job_scripts.RELEASE), before=False),
    RunnerStep.RENEW_ASKED: StepTrap(_runs(job_scripts.RENEW), before=True),
    RunnerStep.RENEWED: StepTrap(_runs(job_scripts.RENEW), before=False),
}


#: The weights with which each step is chosen for a kill, and for a freeze: mostly steps at which
#: the runner holds jobs.
WEIGHTS = {
    RunnerStep.JOIN_ASKED: 1,
    RunnerStep.JOINED: 1,
    RunnerStep.CLAIM_ASKED: 2,
    RunnerStep.CLAIMED: 3,
    RunnerStep.RUNNING: 5,
    RunnerStep.END_ASKED: 3,
    RunnerStep.END_TORN: 3,
    RunnerStep.ENDED: 3,
    RunnerStep.RETURN_ASKED: 3,
    RunnerStep.RETURNED: 3,
    RunnerStep.RENEW_ASKED: 1,
    RunnerStep.RENEWED: 1,
    RunnerStep.ANY: 3,
}
FREEZE_WEIGHTS = {**WEIGHTS, RunnerStep.LONG_END_ASKED: 10}
