"""Who is harmed when and how: one schedule, the same for the same seed and length."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

#: Seconds between two strikes at our own processes, and at a server.
FAULT_EVERY = 1.0
SERVER_FAULT_EVERY = 20.0


class FaultTarget(StrEnum):
    """What is harmed."""

    #: All processes of one user's worker.
    WORKER = "worker"
    SESSION = "session"
    SUPERVISOR = "supervisor"
    NODE = "node"
    #: One of the API's processes.
    API_PROCESS = "api process"
    #: All of the API.
    API = "api"
    ORCHESTRATOR = "orchestrator"
    #: A user's sessions at the exchange are ended, with or without a word.
    BROKER_SESSION = "broker session"
    TEMPORAL = "temporal"
    VALKEY = "valkey"
    POSTGRES = "postgres"
    EXCHANGE = "exchange"


class FaultKind(StrEnum):
    """What is done to it."""

    #: SIGKILL. Whoever does not come back by itself is started again after `seconds`.
    KILL = "kill"
    #: SIGSTOP, and SIGCONT after `seconds`.
    STOP = "stop"
    #: An orderly stop, and a start after `seconds`.
    RESTART = "restart"
    #: Valkey forgets everything, and stays up.
    FLUSH = "flush"
    #: Valkey is killed and comes back as it was `seconds` ago: a replica that lagged was promoted.
    LAG = "lag"
    #: The same, and all that could tell better is gone, too: the orchestrators were stopped meanwhile, a
    #: third of the workers is killed with it, and the broker's lists lag until some seconds afterwards.
    REWIND = "rewind"
    #: All orders that work are cancelled, and meanwhile Valkey forgets everything.
    FLUSH_CANCELS = "flush amid cancels at"


#: How often each of our own is struck, relative to the others.
_PROCESS_WEIGHTS = {
    FaultTarget.WORKER: 5,
    FaultTarget.SESSION: 5,
    FaultTarget.SUPERVISOR: 3,
    FaultTarget.NODE: 2,
    FaultTarget.API_PROCESS: 3,
    FaultTarget.API: 1,
    FaultTarget.ORCHESTRATOR: 3,
    FaultTarget.BROKER_SESSION: 3,
}
#: In every other round, these stand for the plain ones.
_HARDER = {FaultKind.FLUSH: FaultKind.FLUSH_CANCELS, FaultKind.LAG: FaultKind.REWIND}
#: Each comes once before any comes again.
_SERVERS = (
    (FaultTarget.TEMPORAL, FaultKind.KILL),
    (FaultTarget.VALKEY, FaultKind.KILL),
    (FaultTarget.POSTGRES, FaultKind.KILL),
    (FaultTarget.EXCHANGE, FaultKind.KILL),
    (FaultTarget.VALKEY, FaultKind.FLUSH),
    (FaultTarget.VALKEY, FaultKind.LAG),
    (FaultTarget.POSTGRES, FaultKind.RESTART),
    (FaultTarget.EXCHANGE, FaultKind.RESTART),
)


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One harm. `at` and `seconds` are seconds, the first since the begin of the storm.

    `lot` from 0 up to 1 says which of several: the user by number, the process by age.
    """

    at: float
    victim: FaultTarget
    how: FaultKind
    seconds: float = 0.0
    lot: float = 0.0

    def __str__(self) -> str:
        return f"{self.at:7.1f} s  {self.how} {self.victim} ({self.seconds:.1f} s, lot {self.lot:.3f})"


def plan_faults(seed: int, seconds: float, server_every: float = SERVER_FAULT_EVERY) -> list[PlannedFault]:
    """All harm of a storm of so many seconds, in order of time; a server every `server_every` seconds."""
    chance = random.Random(f"strikes {seed}")  # noqa: S311 - who is struck is no secret
    found = []
    deck: list[tuple[FaultTarget, FaultKind]] = []
    harder = False
    at = FAULT_EVERY
    while at < seconds:
        found.append(_process_fault(chance, at))
        at += FAULT_EVERY
    at = server_every / 2
    while at < seconds:
        if not deck:
            harder = not harder
            deck = [(victim, _HARDER.get(how, how) if harder else how) for victim, how in _SERVERS]
            chance.shuffle(deck)
        victim, how = deck.pop()
        found.append(
            PlannedFault(
                at=at,
                victim=victim,
                how=how,
                seconds=round(chance.uniform(0.1, 3.0), 2),
                lot=chance.randrange(1000) / 1000,
            )
        )
        at += server_every
    return sorted(found, key=lambda one: one.at)


def _process_fault(chance: random.Random, at: float) -> PlannedFault:
    victim = chance.choices(list(_PROCESS_WEIGHTS), list(_PROCESS_WEIGHTS.values()))[0]
    if victim is FaultTarget.BROKER_SESSION:
        how = chance.choice((FaultKind.KILL, FaultKind.RESTART))
    else:
        how = chance.choice((FaultKind.KILL, FaultKind.STOP))
    return PlannedFault(
        at=at,
        victim=victim,
        how=how,
        seconds=round(chance.uniform(0.3, 6.0), 2),
        lot=chance.randrange(1000) / 1000,
    )
