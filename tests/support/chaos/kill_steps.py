"""Every step that an order takes on its way, and the kill point of each."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tests.support.proxies.kill_points import KillPoint, Program, ServerLine, When
from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import (
    ANSWER,
    ENQUEUE,
    POP,
    PUMP_EVENTS,
    RESOLVE_OVERDUE,
    SPEND_BUDGET,
)

#: Lots by which the answer to one order is recognised: it names nothing else that is known before.
_FILLED_LOTS = 137


class Way(Enum):
    """How the order comes to that step."""

    #: A client places it.
    PLACED = "placed"
    #: It is filled a while after the broker took it.
    FILLED_LATER = "filled later"
    #: Its row is all there is, as when the API died: the sweeper takes it on.
    LEFT = "left"
    #: The same, and it is overdue.
    LATE = "late"
    #: Overdue, and a worker was about to submit it.
    JOURNALED = "journaled"
    #: It works at the broker, and its client takes it back.
    CANCELLED = "cancelled"
    #: The same, and its client changes its price.
    REPLACED = "replaced"


@dataclass(frozen=True)
class Mine:
    """What tells an order from all others on the wire."""

    user_id: str
    #: Of this order alone.
    symbol: str
    order_id: uuid.UUID | None = None
    #: The broker's name of it; known once the broker has it.
    broker_order_id: str = ""

    @property
    def slot(self) -> bytes:
        return f"{{{self.user_id}}}".encode()

    @property
    def name(self) -> bytes:
        """The order's id as text; known once it is accepted."""
        return str(self.order_id).encode()

    @property
    def raw(self) -> bytes:
        """… and as PostgreSQL has it."""
        assert self.order_id is not None
        return self.order_id.bytes


@dataclass(frozen=True)
class KillStep:
    name: str
    way: Way
    kill_point: Callable[[Mine], KillPoint]
    quantity: int = 1


def _step(
    name: str,
    way: Way,
    program: Program,
    line: ServerLine,
    when: When,
    *says: Callable[[Mine], tuple[bytes, ...]],
    hears: Callable[[Mine], tuple[bytes, ...]] = lambda mine: (),
    cut: str = "",
    quantity: int = 1,
) -> KillStep:
    def kill_point(mine: Mine) -> KillPoint:
        return KillPoint(
            program,
            line,
            when,
            tuple(pattern_of(mine) for pattern_of in says),
            hears(mine),
            cut.encode(),
        )

    return KillStep(f"{program.value}: {name}", way, kill_point, quantity)


def _symbol(mine: Mine) -> tuple[bytes, ...]:
    return (mine.symbol.encode(),)


def _script(sha: str) -> Callable[[Mine], tuple[bytes, ...]]:
    return lambda mine: (sha.encode(), mine.slot)


def _enqueue(mine: Mine) -> tuple[bytes, ...]:
    return (ENQUEUE.sha.encode(), mine.symbol.encode())


def _order_budget(mine: Mine) -> tuple[bytes, ...]:
    """The question for one order's room, after a pop on the same connection: it names the person by
    a hash alone. It has two keys; that for a query has three."""
    return (SPEND_BUDGET.sha.encode() + b"\r\n$1\r\n2\r\n", b":orders\r\n")


def _journal(mine: Mine) -> tuple[bytes, ...]:
    return (keys.journal(mine.user_id, "").encode(),)


def _filled(mine: Mine) -> tuple[bytes, ...]:
    return (mine.name, b'"filled"')


def _pump(mine: Mine) -> tuple[bytes, ...]:
    return (PUMP_EVENTS.sha.encode(),)


def _commit(mine: Mine) -> tuple[bytes, ...]:
    return (b"COMMIT",)


_API = (
    _step("before its row", Way.PLACED, Program.API, ServerLine.POSTGRES, When.BEFORE, _symbol),
    _step("after its row", Way.PLACED, Program.API, ServerLine.POSTGRES, When.AFTER, _symbol),
    _step("before it is queued", Way.PLACED, Program.API, ServerLine.VALKEY, When.BEFORE, _enqueue),
    _step("after it is queued", Way.PLACED, Program.API, ServerLine.VALKEY, When.AFTER, _enqueue),
    _step(
        "before it hears the answer",
        Way.PLACED,
        Program.API,
        ServerLine.VALKEY,
        When.AFTER,
        hears=lambda mine: (b"message", b'"filled_quantity":%d' % _FILLED_LOTS),
        quantity=_FILLED_LOTS,
    ),
)
_SESSION = (
    _step(
        "before the pop",
        Way.PLACED,
        Program.SESSION,
        ServerLine.VALKEY,
        When.BEFORE,
        _script(POP.sha),
    ),
    _step(
        "after the pop",
        Way.PLACED,
        Program.SESSION,
        ServerLine.VALKEY,
        When.AFTER,
        _script(POP.sha),
        hears=_symbol,
    ),
    _step(
        "after the pop, before its budget",
        Way.PLACED,
        Program.SESSION,
        ServerLine.VALKEY,
        When.BEFORE,
        _script(POP.sha),
        _order_budget,
    ),
    _step(
        "after its budget",
        Way.PLACED,
        Program.SESSION,
        ServerLine.VALKEY,
        When.AFTER,
        _script(POP.sha),
        _order_budget,
    ),
    _step(
        "before the journal", Way.PLACED, Program.SESSION, ServerLine.VALKEY, When.BEFORE, _journal
    ),
    _step(
        "after the journal", Way.PLACED, Program.SESSION, ServerLine.VALKEY, When.AFTER, _journal
    ),
    _step(
        "before the broker has it",
        Way.PLACED,
        Program.SESSION,
        ServerLine.EXCHANGE,
        When.BEFORE,
        _symbol,
    ),
    _step(
        "after the broker has it",
        Way.PLACED,
        Program.SESSION,
        ServerLine.EXCHANGE,
        When.AFTER,
        _symbol,
    ),
    _step(
        "before its events",
        Way.PLACED,
        Program.SESSION,
        ServerLine.VALKEY,
        When.BEFORE,
        _script(ANSWER.sha),
    ),
    _step(
        "after its events, before its answer",
        Way.PLACED,
        Program.SESSION,
        ServerLine.VALKEY,
        When.BEFORE,
        _script(ANSWER.sha),
        cut=ANSWER.sha,
    ),
    _step(
        "after its answer",
        Way.PLACED,
        Program.SESSION,
        ServerLine.VALKEY,
        When.AFTER,
        _script(ANSWER.sha),
    ),
)
_RECORDER = (
    # Each ring has a round of the pump, that of an earlier event, too.
    *(
        _step(name, Way.FILLED_LATER, Program.ORCHESTRATOR, ServerLine.VALKEY, when, _pump)
        for name, when in (("before it pumps", When.BEFORE), ("after it pumped", When.AFTER))
    ),
    _step(
        "before it hears of a fill",
        Way.FILLED_LATER,
        Program.ORCHESTRATOR,
        ServerLine.VALKEY,
        When.AFTER,
        hears=_filled,
    ),
    _step(
        "before a fill is written",
        Way.FILLED_LATER,
        Program.ORCHESTRATOR,
        ServerLine.POSTGRES,
        When.BEFORE,
        _filled,
    ),
    # That statement is its own transaction, unless the batch tells of workers, too.
    _step(
        "after a fill is written, before it is acknowledged",
        Way.FILLED_LATER,
        Program.ORCHESTRATOR,
        ServerLine.POSTGRES,
        When.AFTER,
        _filled,
    ),
)


def _sweeper(
    name: str, way: Way, line: ServerLine, when: When, *says: Callable[[Mine], tuple[bytes, ...]]
) -> KillStep:
    return _step(name, way, Program.ORCHESTRATOR, line, when, *says)


def _raw(mine: Mine) -> tuple[bytes, ...]:
    return (mine.raw,)


def _overdue(mine: Mine) -> tuple[bytes, ...]:
    return (RESOLVE_OVERDUE.sha.encode(), mine.name)


def _expired(mine: Mine) -> tuple[bytes, ...]:
    return (mine.raw, b"expired")


def _swept(mine: Mine) -> tuple[bytes, ...]:
    return (mine.name + b":swept",)


def _follow(mine: Mine) -> tuple[bytes, ...]:
    return (b"order-" + mine.name,)


_SWEEPER = (
    _step(
        "after it took an order in hand",
        Way.LEFT,
        Program.ORCHESTRATOR,
        ServerLine.POSTGRES,
        When.AFTER,
        hears=_symbol,
    ),
    _sweeper("before it queues an order", Way.LEFT, ServerLine.VALKEY, When.BEFORE, _enqueue),
    _sweeper("after it queued an order", Way.LEFT, ServerLine.VALKEY, When.AFTER, _enqueue),
    _sweeper("before it notes the next check", Way.LEFT, ServerLine.POSTGRES, When.BEFORE, _raw),
    _sweeper("after it noted the next check", Way.LEFT, ServerLine.POSTGRES, When.AFTER, _raw),
    _sweeper(
        "before it closes a late order's way", Way.LATE, ServerLine.VALKEY, When.BEFORE, _overdue
    ),
    _sweeper(
        "after it closed a late order's way", Way.LATE, ServerLine.VALKEY, When.AFTER, _overdue
    ),
    _sweeper("before it writes the end", Way.LATE, ServerLine.POSTGRES, When.BEFORE, _expired),
    _sweeper(
        "after it wrote the end", Way.LATE, ServerLine.POSTGRES, When.AFTER, _expired, _commit
    ),
    _sweeper("before it writes unknown", Way.JOURNALED, ServerLine.POSTGRES, When.BEFORE, _swept),
    _sweeper(
        "after it wrote unknown", Way.JOURNALED, ServerLine.POSTGRES, When.AFTER, _swept, _commit
    ),
    _sweeper(
        "before it starts the workflow", Way.JOURNALED, ServerLine.TEMPORAL, When.BEFORE, _follow
    ),
    _sweeper(
        "after it started the workflow", Way.JOURNALED, ServerLine.TEMPORAL, When.AFTER, _follow
    ),
)


def _queued(mine: Mine) -> tuple[bytes, ...]:
    return (ENQUEUE.sha.encode(), mine.name)


def _named(mine: Mine) -> tuple[bytes, ...]:
    return (mine.name,)


def _at_broker(mine: Mine) -> tuple[bytes, ...]:
    return (mine.broker_order_id.encode(),)


def _answered(mine: Mine) -> tuple[bytes, ...]:
    return (ANSWER.sha.encode(), mine.name)


def _changes(way: Way, noted: bytes) -> tuple[KillStep, ...]:
    """The way of a cancel or a change; `noted` is the action that the API puts into the audit trail
    first."""
    api, session = Program.API, Program.SESSION

    def row(mine: Mine) -> tuple[bytes, ...]:
        return (noted, mine.name)

    def step(
        name: str,
        program: Program,
        line: ServerLine,
        when: When,
        *says: Callable[[Mine], tuple[bytes, ...]],
    ) -> KillStep:
        return _step(f"{way.value}, {name}", way, program, line, when, *says)

    return (
        step("before its note", api, ServerLine.POSTGRES, When.BEFORE, row),
        step("after its note", api, ServerLine.POSTGRES, When.AFTER, row, _commit),
        step("before it is queued", api, ServerLine.VALKEY, When.BEFORE, _queued),
        step("after it is queued", api, ServerLine.VALKEY, When.AFTER, _queued),
        _step(
            f"{way.value}, before it hears the answer",
            way,
            api,
            ServerLine.VALKEY,
            When.AFTER,
            hears=lambda mine: (b"message", mine.name),
        ),
        _step(
            f"{way.value}, after the pop",
            way,
            session,
            ServerLine.VALKEY,
            When.AFTER,
            _script(POP.sha),
            hears=_named,
        ),
        step("before the broker has it", session, ServerLine.EXCHANGE, When.BEFORE, _at_broker),
        step("after the broker has it", session, ServerLine.EXCHANGE, When.AFTER, _at_broker),
        step("before its answer", session, ServerLine.VALKEY, When.BEFORE, _answered),
        step("after its answer", session, ServerLine.VALKEY, When.AFTER, _answered),
    )


STEPS = (
    *_API,
    *_SESSION,
    *_RECORDER,
    *_SWEEPER,
    *_changes(Way.CANCELLED, b"order.cancel_requested"),
    *_changes(Way.REPLACED, b"order.replace_requested"),
)

#: Where no drills are asked for: an order's whole way, and of what runs next to it the steps at
#: which most is at stake, since something is done and not noted yet.
BRIEF = (
    *_API,
    *_SESSION,
    *(
        step
        for step in STEPS
        if step.name
        in {
            "orchestrator: after a fill is written, before it is acknowledged",
            "orchestrator: after it queued an order",
            "orchestrator: after it wrote the end",
            "orchestrator: after it started the workflow",
            "session: cancelled, after the broker has it",
            "session: replaced, after the broker has it",
        }
    ),
)
