"""The steps of a runner at which it is killed or frozen, as its line to Valkey shows them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from worker_runtime.protocol import job_scripts
from worker_runtime.protocol.scripts import Script


class Step(StrEnum):
    """Asked: what it sent never arrives. The others: it had its effect, and the runner never hears of it."""

    JOIN_ASKED = "join asked"
    JOINED = "joined"
    CLAIM_ASKED = "claim asked"
    CLAIMED = "claimed"
    #: Some milliseconds after the jobs were in hand.
    RUNNING = "running"
    END_ASKED = "end asked"
    #: The end arrives, the claim that was sent with it does not.
    END_TORN = "end torn"
    ENDED = "ended"
    #: As `END_ASKED`, of a job that takes long: when its end arrives, it may be under way a second time.
    LONG_END_ASKED = "long end asked"
    RENEW_ASKED = "renew asked"
    RENEWED = "renewed"
    #: Whatever it does then.
    ANY = "any moment"
    #: Some time after it stood still. No trap: what has stood still dies so.
    THAWED = "thawed"


@dataclass(frozen=True)
class Trap:
    """What a message of the runner contains, and what its answer must, for the trap to spring."""

    says: bytes
    before: bool
    hears: bytes = b""
    #: Commands before this word still arrive.
    cut: bytes = b""
    #: Another thing that the message contains.
    about: bytes = b""

    def sees(self, message: bytes) -> bool:
        return self.says in message and self.about in message


def _sha(script: Script) -> bytes:
    return script.sha.encode()


#: What the id of a job that takes long begins with.
LONG = "long"
_CLAIM, _FINISH = _sha(job_scripts.CLAIM), _sha(job_scripts.FINISH)
TRAPS = {
    Step.JOIN_ASKED: Trap(_sha(job_scripts.JOIN), before=True),
    Step.JOINED: Trap(_sha(job_scripts.JOIN), before=False),
    Step.CLAIM_ASKED: Trap(_CLAIM, before=True),
    Step.CLAIMED: Trap(_CLAIM, before=False, hears=b"jobs"),
    Step.RUNNING: Trap(_CLAIM, before=False, hears=b"jobs"),
    Step.END_ASKED: Trap(_FINISH, before=True),
    Step.END_TORN: Trap(_FINISH, before=True, cut=_CLAIM),
    Step.ENDED: Trap(_FINISH, before=False),
    Step.LONG_END_ASKED: Trap(_FINISH, before=True, about=LONG.encode()),
    Step.RENEW_ASKED: Trap(_sha(job_scripts.RENEW), before=True),
    Step.RENEWED: Trap(_sha(job_scripts.RENEW), before=False),
}


#: How often each is chosen for a kill, and for a freeze: mostly those at which jobs are in hand.
WEIGHTS = {
    Step.JOIN_ASKED: 1,
    Step.JOINED: 1,
    Step.CLAIM_ASKED: 2,
    Step.CLAIMED: 3,
    Step.RUNNING: 5,
    Step.END_ASKED: 3,
    Step.END_TORN: 3,
    Step.ENDED: 3,
    Step.RENEW_ASKED: 1,
    Step.RENEWED: 1,
    Step.ANY: 3,
}
FREEZE_WEIGHTS = {**WEIGHTS, Step.LONG_END_ASKED: 10}


def before(data: bytes, word: bytes) -> bytes:
    """The commands of a message that come before the one with this word; nothing without the word."""
    at = data.find(word) if word else -1
    return data[: data.rfind(b"\r\n*", 0, at) + 2] if at > 0 and b"\r\n*" in data[:at] else b""
