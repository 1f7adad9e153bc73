"""Orders."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Response

from api import problems
from api.auth import Caller, require_user
from api.errors import (
    BodyTooLarge,
    ClientOrderIdReused,
    NotFound,
    OrchestratorUnavailable,
    TemporalUnavailable,
    ValkeyUnavailable,
)
from api.problems import ProblemError
from api.routes.services import InServices
from api.schemas.fields import UserIdInPath
from api.schemas.orders import Order, OrderWithTimeline, PlaceOrder
from api.services.orders import UNSETTLED
from infra.database.orders import OrderNotFound
from worker_runtime.protocol import errors

router = APIRouter(tags=["orders"])

Wait = Annotated[
    float | None,
    Query(ge=0, le=30, allow_inf_nan=False, description="Seconds to wait for the broker's answer."),
]
_LOCATION = {"Location": {"schema": {"type": "string"}, "description": "Where the order is."}}


@router.post(
    "/users/{user_id}/orders",
    status_code=201,
    response_model=Order,
    summary="Place an order",
    responses={
        200: {"model": Order, "description": "A repeat: the first outcome of this client order id."},
        201: {"model": Order, "description": "The broker has answered.", "headers": _LOCATION},
        202: {
            "model": Order,
            "description": "Accepted; the outcome is not known yet. See `Location`.",
            "headers": _LOCATION,
        },
        **problems.responses(
            NotFound,
            BodyTooLarge,
            ClientOrderIdReused,
            errors.Parked,
            errors.UnknownAccount,
            errors.SymbolBlocked,
            errors.AccountBlocked,
            errors.QuantityLimit,
            errors.NotionalLimit,
            errors.DailyOrderLimit,
            errors.PriceTypeRule,
            errors.DuplicateOrder,
            errors.UnknownSymbol,
            errors.MarketClosed,
            errors.TradingHalted,
            errors.ReducingOnly,
            errors.LoginRejected,
            errors.DeadlineExceeded,
            errors.LoginLimited,
            errors.BrokerUnreachable,
            errors.WorkerUnavailable,
            ValkeyUnavailable,
            TemporalUnavailable,
            OrchestratorUnavailable,
        ),
    },
)
async def place_order(
    user_id: UserIdInPath, body: PlaceOrder, caller: Caller, services: InServices, wait: Wait = None
) -> Response:
    """Places one order, and starts the user's worker if there is none.

    Answered as an order whatever the broker says of it, also when it rejects it. Answered as a problem when
    the order did not reach the broker; if it exists nevertheless, it stands in the member `order`: `rejected`
    and `expired` are final, so take a new client order id to try again; with any other state repeat the
    same request to learn the outcome. A repeat never places a second order.
    """
    require_user(caller, user_id)
    seconds = services.settings.order_wait if wait is None else wait
    found = await services.placing.place(user_id, body, seconds, f"key:{caller.key_id}")
    order = found.order
    if found.failure is not None:
        raise ProblemError(found.failure, {"order": order.model_dump(mode="json")})
    status = 202 if order.state in UNSETTLED else 201 if found.new else 200
    # As bytes: FastAPI would validate and convert what has just been built.
    return Response(
        order.model_dump_json(), status, {"Location": f"/v1/orders/{order.id}"}, "application/json"
    )


@router.get(
    "/orders/{order_id}",
    summary="Look at an order",
    responses=problems.responses(OrderNotFound, ValkeyUnavailable),
)
async def get_order(order_id: UUID, caller: Caller, services: InServices) -> OrderWithTimeline:
    """The order and the steps of its life. Another user's order is not found."""
    order = await services.book.get(order_id)
    if not caller.may_see(order.user_id):
        raise OrderNotFound(f"there is no order {order_id}")
    return await services.book.with_timeline(order)
