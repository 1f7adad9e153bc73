"""Routes for an account: its positions and balance; to close a position, to enter or leave the
market."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from msgspec.structs import asdict

from api.container import Call, KnownUserId
from api.http import errors, problems
from api.http.fields import AccountId, view_response
from api.orders.outcomes import UNANSWERED
from api.orders.router import REFUSALS, Wait
from api.positions import schemas
from api.positions.closer import PositionClose
from api.positions.intents import all_answered
from api.positions.parts import CloseView
from infra.database.accounts import AccountNotFound
from worker_runtime.protocol import errors as protocol

router = APIRouter(prefix="/users/{user_id}/accounts/{account_id}", tags=["accounts"])
trading_router = APIRouter(prefix="/users/{user_id}/accounts/{account_id}", tags=["orders"])

Seconds = Annotated[
    float,
    Query(
        alias="wait",
        gt=0,
        le=60,
        allow_inf_nan=False,
        description="Seconds to wait for the broker.",
    ),
]
#: Enough for a worker's start, its login and a broker that takes its time.
BROKER_TIMEOUT_S = 20.0

#: The problems with which every question to a broker may fail.
_BROKER_PROBLEMS = (
    *problems.WITHOUT_WORKER,
    errors.NotFound,
    errors.NoAnswer,
    AccountNotFound,
    protocol.UnknownAccount,
    protocol.RateLimited,
    protocol.BrokerError,
)


@router.get(
    "/positions",
    summary="Get an account's positions",
    responses=problems.responses(*_BROKER_PROBLEMS),
)
async def get_positions(
    user_id: KnownUserId, account_id: AccountId, call: Call, seconds: Seconds = BROKER_TIMEOUT_S
) -> schemas.PositionList:
    """Asks the broker through the user's worker, which is started if there is none."""
    report = await call.services.portfolio.report(user_id, account_id, seconds, positions=True)
    held = sorted(
        (position for position in report.positions if position.shares),
        key=lambda position: position.symbol,
    )
    shown = [schemas.PositionView.of(position) for position in held]
    return schemas.PositionList(
        **schemas.account_fields(user_id, account_id, report), positions=shown
    )


@router.get(
    "/balance", summary="Get an account's balance", responses=problems.responses(*_BROKER_PROBLEMS)
)
async def get_balance(
    user_id: KnownUserId, account_id: AccountId, call: Call, seconds: Seconds = BROKER_TIMEOUT_S
) -> schemas.BalanceView:
    """Asks the broker through the user's worker, which is started if there is none."""
    report = await call.services.portfolio.report(user_id, account_id, seconds, balance=True)
    assert report.balance is not None  # the portfolio has seen to it  # noqa: S101
    money = asdict(report.balance)
    return schemas.BalanceView(**schemas.account_fields(user_id, account_id, report), **money)


SymbolInPath = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]+$", max_length=32, examples=["2330"])]
_TRADING_PROBLEMS: tuple[type[protocol.BerthError], ...] = (
    *_BROKER_PROBLEMS,
    errors.ClientOrderIdReused,
    errors.NoPosition,
    errors.PositionBusy,
    *REFUSALS,
    protocol.DeadlineExceeded,
)


@trading_router.post(
    "/positions/{symbol}/close",
    response_model=CloseView,
    summary="Close a position",
    responses={
        200: problems.answer(
            CloseView, "The broker has answered, now or when this was first asked."
        ),
        202: problems.answer(
            CloseView, "Accepted; the outcome is not known yet. Look at the order."
        ),
        **problems.responses(*_TRADING_PROBLEMS, errors.CloseInvalid),
    },
)
async def close_position(
    user_id: KnownUserId,
    account_id: AccountId,
    symbol: SymbolInPath,
    body: schemas.ClosePositionRequest,
    call: Call,
    wait: Wait = None,
) -> Response:
    """Places an order for the quantity that the broker reports now, at the market unless a price is
    given. A quantity above what the market takes in one order becomes several orders (`parts`),
    written together, with one outcome; repeat the call to see it.

    It passes a switch that lets only reducing orders through. Refused with `POSITION_BUSY` while
    another order works on that side, or if one was filled so lately that the position may not show
    it. A repeat never closes twice.
    """
    close = PositionClose.of(body, user_id, account_id, symbol, call.actor)
    placed = await call.services.closer.close_position(
        close, call.services.settings.order_wait if wait is None else wait
    )
    if placed.failure is not None:
        raise problems.ProblemError(placed.failure, order=placed.order)
    status = 202 if placed.order.state in UNANSWERED else 200
    return view_response(placed.order, status, call.link(f"/v1/orders/{placed.order.id}"))


@trading_router.post(
    "/intents",
    response_model=schemas.IntentView,
    summary="Enter or leave the market",
    responses={
        200: problems.answer(schemas.IntentView, "The broker has answered all of it."),
        202: problems.answer(
            schemas.IntentView,
            "Not all of it is known or done yet. Repeat it to continue: nothing opens by itself.",
        ),
        **problems.responses(*_TRADING_PROBLEMS, errors.CloseNotFilled, errors.IntentExpired),
    },
)
async def carry_out_intent(
    user_id: KnownUserId,
    account_id: AccountId,
    body: schemas.IntentRequest,
    call: Call,
    wait: Wait = None,
) -> Response:
    """`long_entry` buys and `short_entry` sells. An opposite position is closed first, and the new
    one is opened only after that close is confirmed filled. `long_exit` and `short_exit` only
    close.

    Nothing is opened later by itself: when the request ends before the close is filled, repeat it
    with the same id, within the order deadline after the close was accepted. Problems carry the
    orders in `legs`.
    """
    seconds = call.services.settings.order_wait if wait is None else wait
    result = await call.services.intents.run_intent(user_id, account_id, body, seconds, call.actor)
    return view_response(result, 200 if all_answered(result) else 202)
