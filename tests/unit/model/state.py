"""Holds the model of *one-owner* at one moment. Everything is small and hashable; time is ticks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

#: Ticks a lease lasts from the moment its renewal was sent.
TTL = 3
#: Ticks before the end of the lease at which a worker takes nothing more and closes its broker
#: session.
MARGIN = 1
#: Ticks the orchestrator waits when the launcher cannot confirm the end, because the host is lost.
LOST_WAIT = TTL


class Violation(NamedTuple):
    """A property that a step broke."""

    what: str


TWO_SESSIONS = Violation("two sessions of one user are logged in at the same time")
OLD_ORDER = Violation("an order of an old epoch reached the broker after the login of a newer one")
STOLEN_ORDER = Violation("an order was taken by a worker that is not the owner")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The safeguards, each of which a test takes away, and the faults that may happen."""

    #: A new claim begins only after the launcher has confirmed the end of the old worker.
    confirm_stop: bool = True
    #: A worker calls the broker, and logs in, only under a usable lease.
    check_lease: bool = True
    #: `pop.lua` gives an order to the owner's epoch only.
    check_epoch_in_pop: bool = True
    #: `renew_mark.lua` renews for the owner's epoch only.
    check_epoch_in_mark: bool = True
    #: The lease runs from before the renewal was sent; if not, from the arrival of its reply.
    lease_from_send: bool = True
    #: When a host is lost, the owner key is taken from the old epoch before the wait, not after it.
    fence_before_wait: bool = True
    #: The worker of a lost host counts as gone when its mark has run out, which is read after the
    #: fence.
    mark_proves: bool = False
    #: A mark proves nothing until Valkey has kept its data for longer than a lease.
    check_kept: bool = True
    #: No claim is made while the worker of an earlier assignment may still run; that one is ended
    #: first.
    check_unended: bool = True
    #: What a process sent before its end reaches the broker before anything its successor sends.
    wire_keeps_order: bool = True

    #: A worker's host may be lost: the launcher cannot stop what runs there, and says so.
    host_lost: bool = False
    #: Processes may be stopped and let go at any point.
    freezes: bool = True
    #: A second orchestrator may repeat an `set_owner.lua` that the first one sent, at any later
    #: time.
    late_own: bool = True
    #: How often a user's workflow may be terminated: nobody knows its worker any more.
    terminations: int = 0
    #: Claims of orchestrators that stood still, which may begin at any later time.
    late_claims: int = 0
    #: How often Valkey loses everything.
    flushes: int = 1
    #: Orders that users send.
    orders: int = 1
    #: Workers that the user may get, one after the other.
    epochs: int = 2
    #: Sessions that the zygote may replace in place, in each worker.
    replacements: int = 1
    #: Violations that do not end the search, because a test looks for another one behind them.
    overlooked: frozenset[Violation] = frozenset()


class ModelWorker(NamedTuple):
    """The worker of one epoch: supervisor and session."""

    alive: bool = False
    #: The launcher cannot reach it (its host is lost); it may run on.
    lost: bool = False
    session_frozen: bool = False
    supervisor_frozen: bool = False
    sessions: int = 0
    #: The session holds the user's credentials.
    credentials: bool = False
    logged_in: bool = False
    #: Ticks until the lease ends.
    lease: int = 0
    fenced: bool = False
    #: A renewal under way: '', 'sent' or 'reply', and the ticks since it was sent.
    renewal: str = ""
    age: int = 0
    #: What the session is doing: 'idle', 'popping', 'popped', 'checked'.
    doing: str = "idle"
    #: A pop of a session that has ended is still on its way to Valkey.
    late_pop: bool = False
    #: An order that the worker's former process sent is still on its way to the broker.
    late_order: bool = False


class World(NamedTuple):
    """Valkey, broker, orchestrator and all workers; `workers[0]` has epoch 1."""

    workers: tuple[ModelWorker, ...]
    #: Epoch in the owner key; 0: there is none.
    owner: int = 0
    queue: int = 0
    flushes: int = 0
    #: Epoch of the present assignment.
    epoch: int = 0
    #: What the orchestrator does: 'free' (no worker), 'serving', 'stopping', 'waiting' (for a lost
    #: host), 'unknown' (a worker of which no workflow knows).
    phase: str = "free"
    waited: int = 0
    #: An `set_owner.lua` that an orchestrator may still repeat: its epoch.
    late_own: int = 0
    terminations: int = 0
    late_claims: int = 0
    #: The latest epoch whose worker has logged in.
    newest_login: int = 0
    #: Ticks until the mark of the present assignment runs out, and since Valkey lost its data; with
    #: `mark_proves` only.
    mark: int = 0
    kept: int = TTL


#: The launcher confirms every end; processes are stopped and let go at any point, Valkey loses its
#: data, a second orchestrator repeats what the first one did.
CONFIRMED = Rules()
#: The launcher may lose a host on which the worker runs on, cut off. Nothing there is stopped.
HOST_LOST = Rules(host_lost=True, freezes=False, late_own=False, replacements=0)
#: And its mark is believed.
MARK_PROVES = Rules(host_lost=True, freezes=False, late_own=False, replacements=0, mark_proves=True)
#: A workflow may be terminated at any point, and a claim of an orchestrator that stood still come
#: late.
UNKNOWN_WORKERS = Rules(terminations=1, late_claims=1, replacements=0, late_own=False)
#: For harm that lies behind another one.
BEHIND = frozenset({TWO_SESSIONS})
