"""Routes that cancel and replace orders."""

from __future__ import annotations

from uuid import UUID

from fastapi import APIRouter, Response

from api.container import InServices, Services
from api.http import errors, problems
from api.http.auth import Caller, Principal
from api.http.fields import view_response
from api.orders.router import Wait
from api.orders.schemas import CancelRequest, OrderView, ReplaceRequest
from infra.database import models
from infra.database.orders import recording
from infra.database.orders.attention import OrderSettled
from infra.database.orders.states import OrderNotFound
from worker_runtime.protocol import errors as protocol
from worker_runtime.protocol.messages import OrderState

router = APIRouter(prefix="/orders/{order_id}", tags=["orders"])

#: What both may fail with.
_PROBLEMS = (
    OrderNotFound,
    OrderSettled,
    errors.NoAnswer,
    errors.ValkeyUnavailable,
    errors.TemporalUnavailable,
    errors.OrchestratorUnavailable,
    protocol.Parked,
    protocol.OrderRejected,
    protocol.OutcomeUnknown,
    protocol.LoginRejected,
    protocol.BrokerUnreachable,
    protocol.WorkerUnavailable,
)
_LATER = {
    "model": OrderView,
    "description": "Sent on; what became of it is not known yet. Look at the order.",
}


async def _own_order(services: Services, caller: Principal, order_id: UUID) -> models.Order:
    """Raises `OrderNotFound`, also for another user's order."""
    async with services.database.session() as session:
        row = await recording.get_order(session, order_id)
    if not caller.may_see(row.user_id):
        raise OrderNotFound(f"there is no order {order_id}")
    return row


@router.post(
    "/cancel",
    response_model=OrderView,
    summary="Cancel an order",
    responses={
        200: {"model": OrderView, "description": "It is cancelled, perhaps partly filled before."},
        202: _LATER,
        **problems.responses(*_PROBLEMS),
    },
)
async def cancel_order(
    order_id: UUID, body: CancelRequest, caller: Caller, services: InServices, wait: Wait = None
) -> Response:
    """Takes an order back. One that no worker has taken yet is withdrawn and never sent to the broker.

    Passes the kill switch. Also an order of unknown outcome may be cancelled: it is, if the broker lists it.
    A repeat of one that is cancelled already answers 200; any other final state is `ORDER_SETTLED`. A repeat
    joins a cancel that is under way, and sends one anew that came to nothing, also under the same request id.
    """
    row = await _own_order(services, caller, order_id)
    seconds = services.settings.order_wait if wait is None else wait
    changed = await services.changes.cancel(row, body, seconds, caller.actor)
    return view_response(changed.order, 200 if changed.order.state is OrderState.CANCELLED else 202)


@router.post(
    "/replace",
    response_model=OrderView,
    summary="Change an order",
    responses={
        200: {
            "model": OrderView,
            "description": "The broker has changed it, now or when this was first asked.",
        },
        202: _LATER,
        **problems.responses(
            *_PROBLEMS,
            errors.RequestIdReused,
            errors.NotAtBroker,
            errors.OrderUnknown,
            errors.ReplaceInvalid,
        ),
    },
)
async def replace_order(
    order_id: UUID, body: ReplaceRequest, caller: Caller, services: InServices, wait: Wait = None
) -> Response:
    """Lowers the quantity of a working order, changes its price, or both; sent to the broker at most once.

    A repeat under the same request id waits for the first one's answer, and later returns the order as it is.
    """
    row = await _own_order(services, caller, order_id)
    seconds = services.settings.order_wait if wait is None else wait
    changed = await services.changes.replace(row, body, seconds, caller.actor)
    return view_response(changed.order, 200 if changed.answered else 202)
