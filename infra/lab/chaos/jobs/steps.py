"""The steps of a runner at which it is killed or frozen, as its line to Valkey shows them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.protocol.scripts import Script


class RunnerStep(StrEnum):
    """Asked: what it sent never arrives. The others: it had its effect, and the runner never hears of it."""

    JOIN_ASKED = "join asked"
    JOINED = "joined"
    CLAIM_ASKED = "claim asked"
    CLAIMED = "claimed"
    #: Some milliseconds after the jobs were in hand.
    RUNNING = "running"
    END_ASKED = "end asked"
    #: Half of it arrives.
    END_TORN = "end torn"
    ENDED = "ended"
    #: As `END_ASKED`, of a job that takes long: when its end arrives, it may be under way a second time.
    LONG_END_ASKED = "long end asked"
    #: Of jobs that were claimed ahead and have not begun.
    RETURN_ASKED = "return asked"
    RETURNED = "returned"
    RENEW_ASKED = "renew asked"
    RENEWED = "renewed"
    #: Whatever it does then.
    ANY = "any moment"
    #: Some time after it stood still. No trap: what has stood still dies so.
    THAWED = "thawed"


@dataclass(frozen=True)
class StepTrap:
    """What a message of the runner contains, and what its answer must, for the trap to spring."""

    #: One of these.
    says: tuple[bytes, ...]
    before: bool
    hears: bytes = b""
    #: Half of the message still arrives.
    torn: bool = False
    #: Another thing that the message contains.
    about: bytes = b""

    def sees(self, message: bytes) -> bool:
        return any(word in message for word in self.says) and self.about in message

    def lets_through(self, message: bytes) -> bytes:
        """What still arrives before the trap springs."""
        return message[: len(message) // 2] if self.torn else b""


def _runs(*scripts: Script) -> tuple[bytes, ...]:
    return tuple(script.sha.encode() for script in scripts)


#: What the id of a job that takes long begins with.
LONG = "long"
_CLAIMS = _runs(job_scripts.CLAIM, job_scripts.FINISH_AND_CLAIM)
_ENDS = _runs(job_scripts.FINISH, job_scripts.FINISH_AND_CLAIM)
#: How a claim says that it took some. A bell, whose name may come before it, has a longer name.
_JOBS = b"$4\r\njobs\r\n"
TRAPS = {
    RunnerStep.JOIN_ASKED: StepTrap(_runs(job_scripts.JOIN), before=True),
    RunnerStep.JOINED: StepTrap(_runs(job_scripts.JOIN), before=False),
    RunnerStep.CLAIM_ASKED: StepTrap(_CLAIMS, before=True),
    RunnerStep.CLAIMED: StepTrap(_CLAIMS, before=False, hears=_JOBS),
    RunnerStep.RUNNING: StepTrap(_CLAIMS, before=False, hears=_JOBS),
    RunnerStep.END_ASKED: StepTrap(_ENDS, before=True),
    RunnerStep.END_TORN: StepTrap(_ENDS, before=True, torn=True),
    RunnerStep.ENDED: StepTrap(_ENDS, before=False),
    RunnerStep.LONG_END_ASKED: StepTrap(_ENDS, before=True, about=LONG.encode()),
    RunnerStep.RETURN_ASKED: StepTrap(_runs(job_scripts.RELEASE), before=True),
    RunnerStep.RETURNED: StepTrap(_runs(job_scripts.RELEASE), before=False),
    RunnerStep.RENEW_ASKED: StepTrap(_runs(job_scripts.RENEW), before=True),
    RunnerStep.RENEWED: StepTrap(_runs(job_scripts.RENEW), before=False),
}


#: How often each is chosen for a kill, and for a freeze: mostly those at which jobs are in hand.
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
