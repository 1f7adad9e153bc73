"""Routes for orders: place, show, cancel and replace one; list them, export them, follow their
changes."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from api.container import AuthorizedCall, Call, KnownUserId, Services
from api.http import errors, problems
from api.http.fields import UserId, view_response
from api.http.streams import StreamBegin
from api.orders import export, schemas
from api.orders.export import OrderFeed
from api.orders.outcomes import UNANSWERED, view_of
from infra.database import models
from infra.database.orders import listing as order_list
from infra.database.orders import recording
from infra.database.orders.attention import OrderSettled
from infra.database.orders.states import OrderNotFound
from infra.database.users import UserDisabled
from infra.market.calendar import HOME_ZONE_NAME
from worker_runtime.protocol import errors as protocol
from worker_runtime.protocol.messages import OrderState

router = APIRouter(tags=["orders"])

Wait = Annotated[
    float | None,
    Query(ge=0, le=30, allow_inf_nan=False, description="Seconds to wait for the broker's answer."),
]
#: Why a new order, or another price of one, is not taken.
REFUSALS: tuple[type[protocol.BerthError], ...] = (
    UserDisabled,
    protocol.SymbolBlocked,
    protocol.AccountBlocked,
    *protocol.CheckFailed.__subclasses__(),
    protocol.TradingHalted,
    protocol.ReducingOnly,
)
_LOCATION = {"Location": {"schema": {"type": "string"}, "description": "Where the order is."}}


@router.post(
    "/users/{user_id}/orders",
    status_code=201,
    response_model=schemas.OrderView,
    summary="Place an order",
    responses={
        200: problems.answer(
            schemas.OrderView, "A repeat: the first outcome of this client order id."
        ),
        201: problems.answer(schemas.OrderView, "The broker has answered.", _LOCATION),
        202: problems.answer(
            schemas.OrderView, "Accepted; the outcome is not known yet. See `Location`.", _LOCATION
        ),
        **problems.responses(
            *problems.WITHOUT_WORKER,
            errors.ClientOrderIdReused,
            protocol.UnknownAccount,
            *REFUSALS,
            protocol.DeadlineExceeded,
        ),
    },
)
async def place_order(
    user_id: UserId, body: schemas.OrderRequest, call: Call, wait: Wait = None
) -> Response:
    """Starts the user's worker if there is none.

    Returns the order if it reached the broker, even if rejected, or if the outcome is not known
    yet. Otherwise returns a problem; its member `order` holds the order, if one exists: `rejected`
    and `expired` are final, so take a new client order id to try again; with any other state repeat
    the same request to learn the outcome. A repeat never places a second order.
    """
    call.require_user(user_id)
    seconds = call.services.settings.order_wait if wait is None else wait
    result = await call.services.placer.place_order(user_id, body, seconds, call.actor)
    order = result.order
    if result.failure is not None:
        raise problems.ProblemError(result.failure, order=order)
    status = 202 if order.state in UNANSWERED else 201 if result.new else 200
    return view_response(order, status, call.link(f"/v1/orders/{order.id}"))


@router.get(
    "/orders/{order_id}",
    summary="Get an order",
    responses=problems.responses(OrderNotFound, errors.ValkeyUnavailable),
)
async def get_order(order_id: UUID, call: Call) -> schemas.OrderDetailView:
    """Includes every step since it was accepted. Another user's order is not found."""
    order = await call.services.reader.get(order_id)
    if not call.caller.may_see(order.user_id):
        raise OrderNotFound(f"there is no order {order_id}")
    return await call.services.reader.with_timeline(order)


@router.get("/users/{user_id}/orders", summary="List a user's orders")
async def list_orders(
    user_id: KnownUserId, call: Call, query: Annotated[schemas.OrderQuery, Query()]
) -> schemas.OrderPage:
    """Shows them as they are recorded, the newest first. `GET /v1/orders/{order_id}` may be a
    moment ahead of this list.

    Follow `next_cursor` with the same filters; orders that come meanwhile do not move the pages
    behind it.
    """
    return await _page_of_orders(call.services, query, query.of(user_id))


@router.get("/orders", summary="List orders of all users")
async def list_all_orders(
    call: Call, query: Annotated[schemas.OrderQuery, Query()]
) -> schemas.OrderPage:
    """Covers the last 24 hours (before `to`) unless `from` is given. For operators and
    administrators."""
    until = min(query.until or datetime.now(UTC), datetime.now(UTC))
    since = query.since or until - timedelta(days=1)
    return await _page_of_orders(call.services, query, replace(query.of(None), since=since))


async def _page_of_orders(
    services: Services, query: schemas.OrderQuery, selection: order_list.OrderSelection
) -> schemas.OrderPage:
    behind = schemas.position_of(query.cursor) if query.cursor is not None else None
    async with services.database.session() as session:
        rows = await order_list.page_of_orders(
            session, selection, behind=behind, limit=query.limit + 1
        )
    has_more, rows = len(rows) > query.limit, rows[: query.limit]
    end = schemas.cursor_of((rows[-1].created_at, rows[-1].id)) if has_more else None
    return schemas.OrderPage(orders=[view_of(row) for row in rows], next_cursor=end)


@router.get(
    "/users/{user_id}/orders.csv",
    summary="Export a user's orders as CSV",
    response_class=StreamingResponse,
    responses={
        **problems.content(
            f"CSV (RFC 4180) with a header, the newest first. Times are in {HOME_ZONE_NAME}. A "
            "text that a spreadsheet would take for a formula begins with an apostrophe.",
            "text/csv",
        )
    },
)
async def export_orders(
    user_id: KnownUserId, call: Call, query: Annotated[schemas.OrderExportQuery, Query()]
) -> StreamingResponse:
    """Sends all orders that match. The file is cut off if the database goes away while
    it is sent."""
    chunks = export.lines(call.database, query.of(user_id), bom=query.bom)
    # The first page before the answer begins: a database that is down is a problem, not half a
    # file.
    first = await anext(chunks)

    async def whole() -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    return StreamingResponse(whole(), media_type=export.MEDIA_TYPE, headers=export.headers(user_id))


@router.get(
    "/users/{user_id}/orders/events",
    summary="Stream changes of a user's orders",
    response_class=StreamingResponse,
    responses={
        **problems.content(
            "Server-sent events. `event: orders` are those open now (data: `PresentOrders`), "
            "`event: order` is one changed order (data: `OrderView`). Both have an `id` to come "
            "back with.",
            "text/event-stream",
            'event: order\ndata: {"id":"0199…","state":"filled"}\nid: 7311\n\n',
        ),
        **problems.responses(errors.TooManyStreams),
    },
)
async def follow_orders(user_id: KnownUserId, call: Call, begin: StreamBegin) -> StreamingResponse:
    """Begins behind `Last-Event-ID` or `after`.

    Without either: the open orders first, then what changes from now on. An order that changed
    several times since the last event is sent once, as it is now. After a reconnect an order may be
    sent again; none is left out. A new order that nothing happens to is sent within 15 s. A comment
    every 15 s shows that the stream lives. It ends after an hour, and when the server stops: come
    back with the last id.
    """
    return await call.open_stream(OrderFeed(call.database, user_id), begin)


#: The problems with which a cancel and a replace may fail.
_CHANGE_PROBLEMS = (
    *problems.WITHOUT_WORKER,
    OrderNotFound,
    OrderSettled,
    errors.NoAnswer,
    protocol.OrderRejected,
    protocol.OutcomeUnknown,
)
_LATER = problems.answer(
    schemas.OrderView, "Sent to the worker; the outcome is not known yet. Read the order later."
)


async def own_order(call: AuthorizedCall, order_id: UUID) -> models.Order:
    """Raises `OrderNotFound`, also for another user's order."""
    row = await call.database.fetch(recording.get_order, order_id)
    if not call.caller.may_see(row.user_id):
        raise OrderNotFound(f"there is no order {order_id}")
    return row


@router.post(
    "/orders/{order_id}/cancel",
    response_model=schemas.OrderView,
    summary="Cancel an order",
    responses={
        200: problems.answer(schemas.OrderView, "It is cancelled, perhaps partly filled before."),
        202: _LATER,
        **problems.responses(*_CHANGE_PROBLEMS),
    },
)
async def cancel_order(
    order_id: UUID, body: schemas.CancelRequest, call: Call, wait: Wait = None
) -> Response:
    """Withdraws an order that no worker has taken yet, so that it is never sent to the broker.

    Passes the kill switch. Also an order of unknown outcome may be cancelled: it is, if the broker
    lists it. A repeat of one that is cancelled already answers 200; any other final state is
    `ORDER_SETTLED`. A repeat joins a cancel that is under way, and sends one anew that came to
    nothing, also under the same request id.
    """
    row = await own_order(call, order_id)
    seconds = call.services.settings.order_wait if wait is None else wait
    changed = await call.services.changes.cancel(row, body, seconds, call.actor)
    return view_response(changed.order, 200 if changed.order.state is OrderState.CANCELLED else 202)


@router.post(
    "/orders/{order_id}/replace",
    response_model=schemas.OrderView,
    summary="Change an order",
    responses={
        200: problems.answer(
            schemas.OrderView, "The broker has changed it, now or when this was first asked."
        ),
        202: _LATER,
        **problems.responses(
            *_CHANGE_PROBLEMS,
            *REFUSALS,
            errors.RequestIdReused,
            errors.ChangeUnconfirmed,
            errors.NotAtBroker,
            errors.OrderUnknown,
            errors.ReplaceInvalid,
        ),
    },
)
async def replace_order(
    order_id: UUID, body: schemas.ReplaceRequest, call: Call, wait: Wait = None
) -> Response:
    """Lowers the quantity of a working order, changes its price, or both. The change is sent to the
    broker at most once.

    Another price passes the checks and the switches of a new order. A smaller quantity alone always
    passes.

    A repeat under the same request id waits for the first one's answer; later it is answered with
    the order, or with `CHANGE_UNCONFIRMED` if nothing shows that the change was made.
    """
    row = await own_order(call, order_id)
    seconds = call.services.settings.order_wait if wait is None else wait
    changed = await call.services.changes.replace(row, body, seconds, call.actor)
    return view_response(changed.order, 200 if changed.answered else 202)
