"""Routes for an account: its positions and balance; to close a position, to enter or leave the market."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from api.container import InServices
from api.http import errors, problems
from api.http.auth import Caller
from api.http.fields import AccountIdInPath, UserIdInPath, view_response
from api.http.problems import ProblemError
from api.orders.outcomes import UNANSWERED
from api.orders.router import Wait
from api.orders.schemas import OrderView
from api.positions import schemas
from api.positions.closer import PositionClose
from api.positions.intents import all_answered
from worker_runtime.protocol import errors as protocol

router = APIRouter(prefix="/users/{user_id}/accounts/{account_id}", tags=["accounts"])
trading_router = APIRouter(prefix="/users/{user_id}/accounts/{account_id}", tags=["orders"])

Seconds = Annotated[
    float,
    Query(alias="wait", gt=0, le=60, allow_inf_nan=False, description="Seconds to wait for the broker."),
]
#: Enough for a worker's start, its login and a broker that takes its time.
BROKER_WAIT = 20.0

#: What every question to a broker may fail with.
_BROKER_PROBLEMS = (
    errors.NotFound,
    errors.NoAnswer,
    errors.ValkeyUnavailable,
    errors.TemporalUnavailable,
    errors.OrchestratorUnavailable,
    protocol.UnknownAccount,
    protocol.Parked,
    protocol.LoginRejected,
    protocol.LoginLimited,
    protocol.RateLimited,
    protocol.BrokerUnreachable,
    protocol.WorkerUnavailable,
    protocol.BrokerError,
)


@router.get("/positions", summary="Look at positions", responses=problems.responses(*_BROKER_PROBLEMS))
async def get_positions(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    caller: Caller,
    services: InServices,
    seconds: Seconds = BROKER_WAIT,
) -> schemas.PositionList:
    """Asks the broker through the user's worker, which is started if there is none."""
    await services.require_known_user(caller, user_id)
    report = await services.portfolio.report(user_id, account_id, seconds, positions=True)
    held = sorted((one for one in report.positions if one.quantity), key=lambda one: one.symbol)
    return schemas.PositionList(
        user_id=user_id,
        account_id=account_id,
        taken_at=schemas.taken_at(report),
        positions=[schemas.PositionView.of(one) for one in held],
    )


@router.get("/balance", summary="Look at the balance", responses=problems.responses(*_BROKER_PROBLEMS))
async def get_balance(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    caller: Caller,
    services: InServices,
    seconds: Seconds = BROKER_WAIT,
) -> schemas.BalanceView:
    """Asks the broker through the user's worker, which is started if there is none."""
    await services.require_known_user(caller, user_id)
    report = await services.portfolio.report(user_id, account_id, seconds, balance=True)
    assert report.balance is not None  # the portfolio has seen to it  # noqa: S101
    return schemas.BalanceView(
        user_id=user_id,
        account_id=account_id,
        taken_at=schemas.taken_at(report),
        currency=report.balance.currency,
        cash=report.balance.cash,
        available=report.balance.available,
    )


SymbolInPath = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]+$", max_length=32, examples=["2330"])]
_TRADING_PROBLEMS = (
    *_BROKER_PROBLEMS,
    errors.ClientOrderIdReused,
    errors.NoPosition,
    errors.PositionBusy,
    protocol.SymbolBlocked,
    protocol.AccountBlocked,
    protocol.TradingHalted,
    protocol.ReducingOnly,
    protocol.CheckFailed,
    protocol.DeadlineExceeded,
)


@trading_router.post(
    "/positions/{symbol}/close",
    response_model=OrderView,
    summary="Close a position",
    responses={
        200: {
            "model": OrderView,
            "description": "The broker has answered, now or when this was first asked.",
        },
        202: {
            "model": OrderView,
            "description": "Accepted; the outcome is not known yet. Look at the order.",
        },
        **problems.responses(*_TRADING_PROBLEMS, errors.CloseInvalid),
    },
)
async def close_position(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    symbol: SymbolInPath,
    body: schemas.ClosePositionRequest,
    caller: Caller,
    services: InServices,
    wait: Wait = None,
) -> Response:
    """Places the order that closes the position which the broker knows now; at the market unless a price is
    given.

    It passes a switch that lets only reducing orders through. Refused with `POSITION_BUSY` while another
    order works on that side, or if one was filled so lately that the position may not show it. A repeat
    never closes twice.
    """
    await services.require_known_user(caller, user_id)
    close = PositionClose.of(body, user_id, account_id, symbol, caller.actor)
    placed = await services.closer.close_position(
        close, services.settings.order_wait if wait is None else wait
    )
    if placed.failure is not None:
        raise ProblemError(placed.failure, order=placed.order)
    status = 202 if placed.order.state in UNANSWERED else 200
    return view_response(placed.order, status, f"/v1/orders/{placed.order.id}")


@trading_router.post(
    "/intents",
    response_model=schemas.IntentView,
    summary="Enter or leave the market",
    responses={
        200: {"model": schemas.IntentView, "description": "The broker has answered all of it."},
        202: {
            "model": schemas.IntentView,
            "description": "Not all of it is known or done yet. Repeat it to go on: nothing opens by itself.",
        },
        **problems.responses(*_TRADING_PROBLEMS, errors.CloseNotFilled, errors.IntentExpired),
    },
)
async def carry_out_intent(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    body: schemas.IntentRequest,
    caller: Caller,
    services: InServices,
    wait: Wait = None,
) -> Response:
    """`long_entry` buys, `short_entry` sells; a position on the other side is closed first, and only if that
    is confirmed filled is the new one opened. `long_exit` and `short_exit` close such a position.

    Nothing is opened later by itself: when the request ends before the close is filled, repeat it with the
    same id, within the order deadline after the close was accepted. Problems carry the orders in `legs`.
    """
    await services.require_known_user(caller, user_id)
    seconds = services.settings.order_wait if wait is None else wait
    result = await services.intents.run_intent(user_id, account_id, body, seconds, caller.actor)
    return view_response(result, 200 if all_answered(result) else 202)
