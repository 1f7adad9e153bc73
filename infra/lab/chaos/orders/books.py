"""The books of both sides: our orders in PostgreSQL, and the exchange's ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from sqlalchemy import func, select

from infra.database.engine import Database
from infra.database.models import Order, OrderEventRow, WorkerSession
from infra.database.orders.states import OPEN_STATES
from infra.database.trading.models import Reconciliation, WebhookCall
from infra.exchange.client import ExchangeAdmin
from infra.exchange.records import Incident, IncidentKind, LedgerOrder, LedgerSession
from worker_runtime.protocol.messages import OrderState

#: Orders of the ledger may be many: the admin API answers with all of an account at once.
_LEDGER_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class OurOrder:
    """A row of our orders, as far as it is judged."""

    order_id: str
    client_order_id: str
    user_id: str
    account_id: str
    quantity: int
    state: str
    tag: str = ""
    filled_quantity: int = 0
    average_price: Decimal | None = None
    attention: str | None = None
    reason_code: str | None = None
    reason: str | None = None
    created_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class OurSignal:
    """A signal that was stored, as far as it is judged."""

    number: int
    user_id: str
    account_id: str
    lane: str
    completed: bool
    order_ids: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Books:
    """Everything that the judge compares: all orders of all users."""

    ours: Sequence[OurOrder]
    ledger: Sequence[LedgerOrder]
    sessions: Sequence[LedgerSession] = ()
    #: In the order in which they were stored.
    signals: Sequence[OurSignal] = ()
    bans: Sequence[Incident] = field(default_factory=tuple)
    #: Comparisons of the system's own with the broker that found differences and stand open.
    differences: int = 0


async def count_unsettled(database: Database) -> int:
    """Counts the orders that are neither final nor
    on a person's list, and the signals that wait."""
    async with database.session() as session:
        orders = await session.scalar(
            select(func.count()).where(Order.state.in_(OPEN_STATES), Order.attention.is_(None))
        )
        waiting = await session.scalar(
            select(func.count()).select_from(WebhookCall).where(WebhookCall.completed_at.is_(None))
        )
    return int(orders or 0) + int(waiting or 0)


async def read_books(database: Database, exchange_url: str, *, tags_only: bool = False) -> Books:
    """Reads the books of both sides.

    `tags_only`: the broker's ledger has no order ids of ours, no epochs and no word for the
    end of the day, as with the stand-in for Shioaji: an order is known by its account and
    tag, a worker by its id.
    """
    async with database.session() as session:
        rows = list(await session.scalars(select(Order).order_by(Order.created_at)))
        calls = list(
            await session.scalars(
                select(WebhookCall).where(WebhookCall.digest.is_not(None)).order_by(WebhookCall.id)
            )
        )
        differences = await session.scalar(
            select(func.count())
            .select_from(Reconciliation)
            .where(Reconciliation.resolved_at.is_(None))
        )
        epochs = {
            str(worker_id): epoch
            for worker_id, epoch in await session.execute(
                select(WorkerSession.worker_id, WorkerSession.epoch)
            )
        }
    ours = [_ours(row) for row in rows]
    async with ExchangeAdmin(exchange_url, timeout=_LEDGER_TIMEOUT_S) as exchange:
        ledger, sessions = await exchange.ledger(), await exchange.sessions()
        if tags_only:
            ledger = [name_order(order, ours, epochs) for order in ledger]
            sessions = [
                session.model_copy(update={"client": _name_of(session.client, epochs)})
                for session in sessions
            ]
        return Books(
            ours=ours,
            signals=[_signal(call) for call in calls],
            ledger=ledger,
            sessions=sessions,
            bans=await exchange.incidents(IncidentKind.BANNED),
            differences=int(differences or 0),
        )


def name_order(
    order: LedgerOrder, ours: Sequence[OurOrder], epochs: Mapping[str, int]
) -> LedgerOrder:
    """Returns an order of a ledger that keeps only tags,
    with our order's id and the epoch of its worker.

    A tag that our books do not know keeps an empty id, which the judge takes for a lost order.
    """
    notes = [
        ordered.order_id
        for ordered in ours
        if (ordered.account_id, ordered.tag) == (order.account, order.tag)
    ]
    state = OrderState.CANCELLED if order.state is OrderState.EXPIRED else order.state
    named = {"client_note": notes[0] if notes else "", "client": _name_of(order.client, epochs)}
    return order.model_copy(update={**named, "state": state})


def _name_of(worker_id: str, epochs: Mapping[str, int]) -> str:
    return f"{worker_id}/{epochs.get(worker_id, 0)}"


def _signal(call: WebhookCall) -> OurSignal:
    return OurSignal(
        number=call.id,
        user_id=call.user_id,
        account_id=call.account_id,
        lane=call.lane or "",
        completed=call.completed_at is not None,
        order_ids=[str(order_id) for order_id in call.order_ids],
    )


def _ours(row: Order) -> OurOrder:
    return OurOrder(
        order_id=str(row.id),
        client_order_id=row.client_order_id,
        user_id=row.user_id,
        account_id=row.account_id,
        quantity=row.quantity,
        state=row.state,
        tag=row.tag,
        filled_quantity=row.filled_quantity,
        average_price=row.average_price,
        attention=row.attention,
        reason_code=row.reason_code,
        reason=row.reason,
        created_at=row.created_at,
    )


async def trace_order(database: Database, order_id: str) -> list[str]:
    """Returns the events of one order, in the order in which they were recorded."""
    async with database.session() as session:
        rows = await session.scalars(
            select(OrderEventRow)
            .where(OrderEventRow.order_id == UUID(order_id))
            .order_by(OrderEventRow.recorded_at, OrderEventRow.at)
        )
        return [f"{row.at.isoformat()} {row.state} {row.event_id} {row.data}" for row in rows]
