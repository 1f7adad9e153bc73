"""A user's orders: as pages, as a file, and as a stream of their changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from api import problems
from api.auth import Caller
from api.errors import NotFound, TooManyStreams
from api.routes.services import InServices
from api.routes.timeline import After, LastEventId
from api.routes.workers import known
from api.schemas.fields import UserIdInPath
from api.schemas.order_list import OrderFilter, OrderPage, OrderQuery, cursor_of, position_of
from api.services import order_export
from api.services.order_events import OrderFeed
from api.services.orders import view_of
from infra.database import order_list

router = APIRouter(prefix="/users/{user_id}", tags=["orders"])


@router.get("/orders", summary="List orders", responses=problems.responses(NotFound))
async def list_orders(
    user_id: UserIdInPath, caller: Caller, services: InServices, query: Annotated[OrderQuery, Query()]
) -> OrderPage:
    """Orders as they are recorded, the newest first. An order's own page may be a moment ahead of it.

    Follow `next_cursor` with the same filters; orders that come meanwhile do not move the pages behind it.
    """
    behind = position_of(query.cursor) if query.cursor is not None else None
    await known(services, caller, user_id)
    async with services.database.session() as session:
        rows = await order_list.page(session, query.of(user_id), behind=behind, limit=query.limit + 1)
    more, rows = len(rows) > query.limit, rows[: query.limit]
    end = cursor_of(order_list.position(rows[-1])) if more else None
    return OrderPage(orders=[view_of(row) for row in rows], next_cursor=end)


@router.get(
    "/orders.csv",
    summary="Export orders",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "CSV (RFC 4180) with a header, the newest first. A text that a spreadsheet would"
            " take for a formula begins with an apostrophe.",
            "content": {"text/csv": {"schema": {"type": "string"}}},
        },
        **problems.responses(NotFound),
    },
)
async def export_orders(
    user_id: UserIdInPath, caller: Caller, services: InServices, query: Annotated[OrderFilter, Query()]
) -> StreamingResponse:
    """All orders that match, as one file. It is cut off when the database goes away while it is sent."""
    await known(services, caller, user_id)
    found = order_export.lines(services.database, query.of(user_id))
    # The first page before the answer begins: a database that is down is a problem, not half a file.
    first = await anext(found)

    async def whole() -> AsyncIterator[bytes]:
        yield first
        async for chunk in found:
            yield chunk

    headers = {
        "Content-Disposition": f'attachment; filename="orders-{user_id}.csv"',
        "Cache-Control": "no-store",
    }
    return StreamingResponse(whole(), media_type="text/csv; charset=utf-8; header=present", headers=headers)


@router.get(
    "/orders/events",
    summary="Follow changes of orders",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events. `event: orders` are those open now (data: `PresentOrders`),"
            " `event: order` is one changed order as it is (data: `Order`). Both have an `id` to come back"
            " with.",
            "content": {
                "text/event-stream": {
                    "schema": {"type": "string"},
                    "example": 'event: order\ndata: {"id":"0199…","state":"filled"}\nid: 7311\n\n',
                }
            },
        },
        **problems.responses(NotFound, TooManyStreams),
    },
)
async def follow_orders(
    user_id: UserIdInPath,
    caller: Caller,
    services: InServices,
    after: After = None,
    last_event_id: LastEventId = None,
) -> StreamingResponse:
    """Orders as they change, behind `Last-Event-ID` or `after`.

    Without either: the open orders first, then what changes from now on. An order that changed several times
    since the last look is told once, as it is. After a reconnect an order may be told again; none is left
    out. A new order that nothing happens to is told within 15 s. A comment every 15 s shows that the stream
    lives. It ends after an hour, and when the server stops: come back with the last id.
    """
    await known(services, caller, user_id)
    begin = after if last_event_id is None else last_event_id
    return await services.streams.answer(OrderFeed(services.database, user_id), caller.key_id, begin)
