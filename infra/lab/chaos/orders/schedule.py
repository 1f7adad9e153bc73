"""The schedule of faults: what is broken, when and how.
The same seed and length give the same one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

#: Seconds between two faults of our own processes.
FAULT_INTERVAL_S = 1.0
#: Seconds between two faults of servers.
SERVER_FAULT_INTERVAL_S = 20.0


class FaultTarget(StrEnum):
    """The target into which a fault is injected."""

    #: All processes of one user's worker.
    WORKER = "worker"
    #: All workers of every third user at once, as when their host is lost.
    HOST = "host"
    SESSION = "session"
    SUPERVISOR = "supervisor"
    NODE = "node"
    #: A process of the API.
    API_PROCESS = "api process"
    #: The clock of one of the API's processes.
    API_CLOCK = "clock of an api process"
    #: All of the API.
    API = "api"
    ORCHESTRATOR = "orchestrator"
    #: A user's sessions at the exchange are ended, with or without a message.
    BROKER_SESSION = "broker session"
    #: A user's account at the exchange.
    ACCOUNT = "account"
    TEMPORAL = "temporal"
    VALKEY = "valkey"
    POSTGRES = "postgres"
    EXCHANGE = "exchange"


class FaultKind(StrEnum):
    """Says what is done to the target."""

    #: SIGKILL. A process that does not come back by itself is started again after `seconds`.
    KILL = "kill"
    #: SIGSTOP, and SIGCONT after `seconds`.
    STOP = "stop"
    #: Its sessions end, and for a while the exchange rejects its keys.
    REJECT = "reject logins of"
    #: Ten minutes ahead or behind, until the process is killed for something else.
    SKEW = "skew"
    #: An orderly stop, and a start after `seconds`.
    RESTART = "restart"
    #: Valkey forgets everything, and stays up.
    FLUSH = "flush"
    #: Valkey is killed and comes back as it was `seconds` ago: a replica that lagged was promoted.
    LAG = "lag"
    #: The same, and nothing else knows better: the orchestrators were stopped meanwhile, a third of
    #: the workers is killed with it, and the broker's lists lag until some seconds afterwards.
    REWIND = "rewind"
    #: All orders that work are cancelled, and meanwhile Valkey forgets everything.
    FLUSH_CANCELS = "flush amid cancels at"


#: The weights with which each of our own processes is hit, relative to the others.
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
    (FaultTarget.HOST, FaultKind.KILL),
    #: Lasts longer than marks live; then the workers come back next to their successors.
    (FaultTarget.HOST, FaultKind.STOP),
    (FaultTarget.API_CLOCK, FaultKind.SKEW),
    (FaultTarget.ACCOUNT, FaultKind.REJECT),
)


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """A fault. `at` is in seconds since the begin of the run; `seconds` is how long it lasts.

    `lot` from 0 up to 1 says which of several: the user by number, the process by age.
    """

    at: float
    target: FaultTarget
    kind: FaultKind
    seconds: float = 0.0
    lot: float = 0.0

    def __str__(self) -> str:
        which = f"{self.lot:.0%} down the list"
        return f"{self.at:7.1f} s  {self.kind} {self.target} ({self.seconds:.1f} s, {which})"


def plan_faults(
    seed: int, seconds: float, server_every: float = SERVER_FAULT_INTERVAL_S
) -> list[PlannedFault]:
    """Plans all faults of a run of `seconds`, in order of time;
    a server's every `server_every` seconds."""
    # Another string would give each seed another plan.
    chance = random.Random(f"strikes {seed}")  # noqa: S311 - faults are no secret
    faults = []
    deck: list[tuple[FaultTarget, FaultKind]] = []
    harder = False
    at = FAULT_INTERVAL_S
    while at < seconds:
        faults.append(_process_fault(chance, at))
        at += FAULT_INTERVAL_S
    at = server_every / 2
    while at < seconds:
        if not deck:
            harder = not harder
            deck = [
                (target, _HARDER.get(kind, kind) if harder else kind) for target, kind in _SERVERS
            ]
            chance.shuffle(deck)
        target, kind = deck.pop()
        faults.append(
            PlannedFault(
                at=at,
                target=target,
                kind=kind,
                seconds=round(chance.uniform(0.1, 3.0), 2),
                lot=chance.randrange(1000) / 1000,
            )
        )
        at += server_every
    return sorted(faults, key=lambda fault: fault.at)


def _process_fault(chance: random.Random, at: float) -> PlannedFault:
    target = chance.choices(list(_PROCESS_WEIGHTS), list(_PROCESS_WEIGHTS.values()))[0]
    if target is FaultTarget.BROKER_SESSION:
        kind = chance.choice((FaultKind.KILL, FaultKind.RESTART))
    else:
        kind = chance.choice((FaultKind.KILL, FaultKind.STOP))
    return PlannedFault(
        at=at,
        target=target,
        kind=kind,
        seconds=round(chance.uniform(0.3, 6.0), 2),
        lot=chance.randrange(1000) / 1000,
    )
