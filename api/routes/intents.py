"""Closing positions, and entries and exits that reverse them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from api import errors, problems
from api.auth import Caller
from api.problems import ProblemError
from api.routes import portfolio
from api.routes.orders import Wait
from api.routes.services import InServices
from api.routes.workers import known
from api.schemas.fields import AccountIdInPath, UserIdInPath
from api.schemas.intents import ClosePosition, IntentResult, TradeIntent
from api.schemas.orders import Order
from api.services.closing import Close
from api.services.intents import settled
from api.services.orders import UNSETTLED
from worker_runtime.protocol import errors as protocol

router = APIRouter(prefix="/users/{user_id}/accounts/{account_id}", tags=["orders"])

SymbolInPath = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]+$", max_length=32, examples=["2330"])]
_PROBLEMS = (
    *portfolio.PROBLEMS,
    errors.BodyTooLarge,
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


@router.post(
    "/positions/{symbol}/close",
    response_model=Order,
    summary="Close a position",
    responses={
        200: {"model": Order, "description": "The broker has answered, now or when this was first asked."},
        202: {"model": Order, "description": "Accepted; the outcome is not known yet. Look at the order."},
        **problems.responses(*_PROBLEMS, errors.CloseInvalid),
    },
)
async def close_position(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    symbol: SymbolInPath,
    body: ClosePosition,
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
    await known(services, caller, user_id)
    wish = Close(
        user_id=user_id,
        account_id=account_id,
        symbol=symbol,
        client_order_id=body.client_order_id,
        fingerprint=body.fingerprint(account_id, symbol),
        origin="close",
        actor=f"key:{caller.key_id}",
        price_type=body.price_type,
        price=body.price,
        time_in_force=body.lasts,
        quantity=body.quantity,
    )
    placed = await services.closing.close(wish, services.settings.order_wait if wait is None else wait)
    if placed.failure is not None:
        raise ProblemError(placed.failure, {"order": placed.order.model_dump(mode="json")})
    status = 202 if placed.order.state in UNSETTLED else 200
    return Response(
        placed.order.model_dump_json(),
        status,
        {"Location": f"/v1/orders/{placed.order.id}"},
        "application/json",
    )


@router.post(
    "/intents",
    response_model=IntentResult,
    summary="Enter or leave the market",
    responses={
        200: {"model": IntentResult, "description": "The broker has answered all of it."},
        202: {
            "model": IntentResult,
            "description": "Not all of it is known or done yet. Repeat it to go on: nothing opens by itself.",
        },
        **problems.responses(*_PROBLEMS, errors.CloseNotFilled, errors.IntentExpired),
    },
)
async def carry_out_intent(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    body: TradeIntent,
    caller: Caller,
    services: InServices,
    wait: Wait = None,
) -> Response:
    """`long_entry` buys, `short_entry` sells; a position on the other side is closed first, and only if that
    is confirmed filled is the new one opened. `long_exit` and `short_exit` close such a position.

    Nothing is opened later by itself: when the request ends before the close is filled, repeat it with the
    same id, within the order deadline after the close was accepted. Problems carry the orders in `legs`.
    """
    await known(services, caller, user_id)
    seconds = services.settings.order_wait if wait is None else wait
    result = await services.intents.carry_out(user_id, account_id, body, seconds, f"key:{caller.key_id}")
    return Response(result.model_dump_json(), 200 if settled(result) else 202, media_type="application/json")
