"""Filters and pages of a user's orders."""

from __future__ import annotations

import base64
import binascii
import uuid
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from api.errors import InvalidRequest
from api.schemas.fields import AccountId, View
from api.schemas.orders import ORDER_VIEW_EXAMPLE, ClientOrderId, Order, Symbol
from infra.database.order_list import FINAL, OPEN, Position, Wanted
from worker_runtime.protocol.messages import OrderState, Side

#: Times far outside of a market's life are typing errors, and some would overflow on their way.
_FIRST, _LAST = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
_Time = Annotated[AwareDatetime, Field(ge=_FIRST, le=_LAST)]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

OrderStateFilter = StrEnum(  # type: ignore[misc]
    "OrderStateFilter",
    {"OPEN": OPEN, "FINAL": FINAL, **{state.name: state.value for state in OrderState}},
)


class OrderFilter(BaseModel):
    """Which orders are wanted. Unknown filters are refused: a misspelt one would show too much."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: Annotated[
        list[OrderStateFilter],
        Field(max_length=20, description="States, `open` or `final`; given several times: any of them."),
    ] = []
    account: AccountId | None = None
    symbol: Symbol | None = None
    side: Side | None = None
    client_order_id: ClientOrderId | None = None
    since: Annotated[_Time | None, Field(alias="from", description="Accepted at or after this time.")] = None
    until: Annotated[_Time | None, Field(alias="to", description="Accepted before this time.")] = None

    @model_validator(mode="after")
    def _times_are_in_order(self) -> Self:
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ValueError("`from` is not before `to`")
        return self

    def of(self, user_id: str) -> Wanted:
        return Wanted(
            user_id=user_id,
            states=frozenset(state.value for state in self.state),
            account_id=self.account,
            symbol=self.symbol,
            side=self.side.value if self.side else None,
            client_order_id=self.client_order_id,
            since=self.since,
            until=self.until,
        )


class OrderQuery(OrderFilter):
    """A filter, and which page of what it finds."""

    cursor: Annotated[
        str | None,
        Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=64, description="`next_cursor` of the page before."),
    ] = None
    limit: Annotated[int, Field(ge=1, le=500, description="Most orders of one page.")] = 100


class OrderPage(View):
    """Orders, the newest first."""

    model_config = ConfigDict(
        frozen=True,
        json_schema_extra={
            "examples": [{"orders": [ORDER_VIEW_EXAMPLE], "next_cursor": "AAY6sY7tQAABmfHCpbh8Pp1PahssPU5f"}]
        },
    )

    orders: list[Order]
    next_cursor: Annotated[
        str | None,
        Field(description="`cursor` of the next page; null when there is nothing behind this one."),
    ]


class PresentOrders(View):
    """The open orders with which an event stream begins, the newest first."""

    user_id: str
    orders: list[Order]
    complete: Annotated[bool, Field(description="False: there are more than these.")]


def cursor_of(position: Position) -> str:
    """A page's end as text: microseconds and the order's id."""
    at, order_id = position
    microseconds = (at - _EPOCH) // timedelta(microseconds=1)
    return base64.urlsafe_b64encode(microseconds.to_bytes(8, "big") + order_id.bytes).decode().rstrip("=")


def position_of(cursor: str) -> Position:
    """Raises `InvalidRequest` for a text that no page gave."""
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        if len(raw) != 24:
            raise ValueError
        at = _EPOCH + timedelta(microseconds=int.from_bytes(raw[:8], "big"))
    except (ValueError, OverflowError, binascii.Error):
        error = {"loc": ["query", "cursor"], "msg": "not a cursor of this list", "type": "value_error"}
        raise InvalidRequest("not valid: query.cursor", [error]) from None
    return at, uuid.UUID(bytes=raw[8:])
