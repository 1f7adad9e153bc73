"""The admin HTTP API, by which tests,
the CLI and benchmarks set up the exchange and read its ledger.

It has no authentication and must listen on a private address.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from fastapi import FastAPI, Path, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from infra.exchange.behaviour import ALL_ACCOUNTS, Behaviour, FaultPlan
from infra.exchange.exchange import PaperExchange
from infra.exchange.hours import ExchangeMaintenance
from infra.exchange.instruments import InstrumentSettings
from infra.exchange.limits import ExchangeLimits, LimitOwner
from infra.exchange.market import PriceWalk
from infra.exchange.records import (
    AccountRegistration,
    ExchangeHealth,
    Incident,
    IncidentKind,
    LedgerOrder,
    LedgerSession,
    LimitOwnerKind,
)
from worker_runtime.protocol.errors import BerthError, OrderRejected, UnknownAccount

_STATUS_BY_ERROR = {UnknownAccount: 404, OrderRejected: 409}

AccountName = Annotated[str, Path(min_length=1, max_length=64)]


class _AdminModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SymbolPrice(_AdminModel):
    price: Decimal = Field(gt=0, le=10_000_000, allow_inf_nan=False)


class ManualFillRequest(_AdminModel):
    """By default all of the rest at the market's price."""

    quantity: int | None = Field(default=None, ge=1)
    price: Decimal | None = Field(default=None, gt=0, le=10_000_000, allow_inf_nan=False)


class ExchangeCancelRequest(_AdminModel):
    reason: str = "cancelled by the exchange"


class EndSessionsRequest(_AdminModel):
    reason: str = "ended by the exchange"
    #: Breaks the connections without a message to the clients.
    abrupt: bool = False


class EndedSessions(_AdminModel):
    sessions: int


class ReceivedChanges(_AdminModel):
    changes: int


class ExpiredOrders(_AdminModel):
    orders: int


class LiftBanRequest(_AdminModel):
    """The person or address whose ban is lifted."""

    owner_kind: LimitOwnerKind
    owner: str = Field(max_length=64)


def create_admin(exchange: PaperExchange) -> FastAPI:
    """Creates the app; its handlers run in the exchange's loop and use it directly."""
    app = FastAPI(title="Berth paper exchange: admin", version="1")

    @app.exception_handler(BerthError)
    async def refuse(request: Request, error: BerthError) -> JSONResponse:
        status = _STATUS_BY_ERROR.get(type(error), 400)
        return JSONResponse({"code": error.code, "detail": error.detail}, status_code=status)

    @app.post("/accounts", status_code=204)
    async def register_account(registration: AccountRegistration) -> None:
        exchange.accounts.register(registration)

    @app.put("/accounts/{account}/behaviour", status_code=204)
    async def set_behaviour(account: AccountName, behaviour: Behaviour) -> None:
        exchange.set_behaviour(account, behaviour)

    @app.get("/accounts/{account}/behaviour")
    async def get_behaviour(account: AccountName) -> Behaviour:
        return exchange.accounts.behaviour(account)

    @app.post("/accounts/{account}/end-sessions")
    async def end_sessions(account: AccountName, body: EndSessionsRequest) -> EndedSessions:
        return EndedSessions(
            sessions=exchange.sessions.end(account, body.reason, abrupt=body.abrupt)
        )

    @app.get("/accounts/{account}/changes")
    async def count_changes(account: AccountName) -> ReceivedChanges:
        """Counts the cancels and replacements that arrived since the exchange started, also refused
        ones."""
        return ReceivedChanges(changes=exchange.accounts.received_changes[account])

    @app.put("/accounts/{account}/fault-plan", status_code=204)
    async def set_fault_plan(account: AccountName, plan: FaultPlan) -> None:
        exchange.accounts.set_fault_plan(account, plan)

    @app.get("/accounts/{account}/fault-plan")
    async def get_fault_plan(account: AccountName) -> FaultPlan:
        return exchange.accounts.fault_plan(account)

    @app.put("/fault-plan", status_code=204)
    async def set_fault_plan_of_all(plan: FaultPlan) -> None:
        """Sets the fault plan of all accounts that have no plan of their own."""
        exchange.accounts.set_fault_plan(ALL_ACCOUNTS, plan)

    @app.get("/fault-plan")
    async def get_fault_plan_of_all() -> FaultPlan:
        return exchange.accounts.fault_plan(ALL_ACCOUNTS)

    @app.put("/limits", status_code=204)
    async def set_limits(limits: ExchangeLimits) -> None:
        exchange.sessions.set_limits(limits)

    @app.get("/limits")
    async def get_limits() -> ExchangeLimits:
        return exchange.sessions.limits

    @app.get("/incidents")
    async def read_incidents(
        kind: IncidentKind | None = None, owner: str | None = None, since_ms: int = 0
    ) -> list[Incident]:
        """Lists refused calls, bans, suspensions and what lifted them, oldest first."""
        return exchange.ledger.incidents(kind=kind, owner=owner, since_ms=since_ms)

    @app.post("/incidents/lift", status_code=204)
    async def lift(body: LiftBanRequest) -> None:
        """Ends the ban and the suspension of a person or an address."""
        exchange.sessions.limiter.lift(LimitOwner(body.owner_kind, body.owner))

    @app.post("/maintenance", status_code=204)
    async def announce_maintenance(window: ExchangeMaintenance) -> None:
        exchange.sessions.maintenance.announce(window)

    @app.get("/maintenance")
    async def get_maintenance() -> tuple[ExchangeMaintenance, ...]:
        return exchange.sessions.maintenance.windows

    @app.delete("/maintenance", status_code=204)
    async def cancel_maintenance() -> None:
        """Ends the open window and cancels those to come."""
        exchange.sessions.maintenance.cancel_all()

    @app.post("/day/close")
    async def close_day() -> ExpiredOrders:
        """Ends the trading day: all resting orders expire."""
        return ExpiredOrders(orders=exchange.close_day())

    @app.put("/instruments", status_code=204)
    async def set_instruments(settings: InstrumentSettings) -> None:
        """Replaces what is changed of the list of instruments."""
        exchange.instruments.set(settings)

    @app.get("/instruments")
    async def get_instruments() -> InstrumentSettings:
        return exchange.instruments.settings

    @app.put("/market/walk", status_code=204)
    async def set_walk(walk: PriceWalk) -> None:
        exchange.market.set_walk(walk)

    @app.get("/market/walk")
    async def get_walk() -> PriceWalk:
        return exchange.market.walk

    @app.post("/symbols/{symbol}/price", status_code=204)
    async def set_price(symbol: str, body: SymbolPrice) -> None:
        exchange.market.set_price(symbol, body.price)

    @app.get("/symbols/{symbol}/price")
    async def get_price(symbol: str) -> SymbolPrice:
        return SymbolPrice(price=exchange.market.price(symbol))

    @app.post("/orders/{broker_order_id}/fill")
    async def fill_order(broker_order_id: str, body: ManualFillRequest) -> LedgerOrder:
        return exchange.fill_by_hand(broker_order_id, body.quantity, body.price)

    @app.post("/orders/{broker_order_id}/cancel")
    async def cancel_order(broker_order_id: str, body: ExchangeCancelRequest) -> LedgerOrder:
        return exchange.cancel(broker_order_id, body.reason)

    @app.get("/ledger")
    async def read_ledger(account: str | None = None, after: str = "") -> list[LedgerOrder]:
        """Lists orders with fills, oldest first; with `after`, only those after this broker order
        id."""
        return exchange.ledger.orders(account, after=after)

    @app.get("/sessions")
    async def read_sessions(
        account: str | None = None, open: bool | None = None
    ) -> list[LedgerSession]:
        return exchange.ledger.sessions(account, open)

    @app.get("/healthz")
    async def healthz() -> ExchangeHealth:
        return ExchangeHealth(
            status="ok", connections=len(exchange.sessions), orders=exchange.ledger.count_orders()
        )

    return app
