"""Bodies, filters and views of orders. Quantities are lots (of odd-lot orders: shares); prices are
in the instrument's currency."""

import base64
import binascii
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from api.http.errors import InvalidRequest
from api.http.fields import AccountId, Body, Price, View, plain_price
from api.http.times import QueryEnd, QueryStart
from infra.database.orders.listing import FINAL, OPEN, OrderPosition, OrderSelection
from infra.market.calendar import HOME_ZONE_NAME
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce
from worker_runtime.protocol.order_terms import OpenClose, OrderCondition, OrderLot

#: Lots. Catches typing errors. The broker's record has the market's real maximum.
MAX_QUANTITY = 10_000

ClientOrderId = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9._:-]+$",
        max_length=64,
        description="Your own id of this order, unique for the user. A repeat returns the "
        "first outcome.",
    ),
]
Symbol = Annotated[str, Field(pattern=r"^[A-Za-z0-9./_-]+$", max_length=32)]
OrderPrice = Annotated[Decimal, Field(gt=0, max_digits=14, decimal_places=4, allow_inf_nan=False)]
LimitPrice = Annotated[
    OrderPrice | None,
    Field(description="Required with LMT, refused with MKT and MKP (range market)."),
]
Lot = Annotated[
    OrderLot, Field(description="Of stocks. `odd` (after the close) and `intraday_odd`: shares.")
]
Condition = Annotated[
    OrderCondition, Field(description="Of stocks. Each has positions of its own.")
]
OpenCloseType = Annotated[
    OpenClose, Field(description="Of futures; `auto` closes before it opens.")
]


class OrderPriceRounding(StrEnum):
    """Says what becomes of a limit price between two steps."""

    REFUSE = "refuse"
    PASSIVE = "passive"


_USUAL = frozenset({OrderLot.COMMON, OrderCondition.CASH, OpenClose.AUTO})


def special_terms(*terms: OrderLot | OrderCondition | OpenClose | None) -> list[str]:
    """Returns the terms for a fingerprint, without the usual ones, so that fingerprints equal those
    of release 0.1.0."""
    return [term.value for term in terms if term is not None and term not in _USUAL]


def require_matching_price(price_type: PriceType, price: Decimal | None) -> None:
    """Raises `ValueError` unless there is a price exactly with a limit order."""
    if price_type is PriceType.LIMIT and price is None:
        raise ValueError("a limit order needs a price")
    if price_type is not PriceType.LIMIT and price is not None:
        raise ValueError("a market order has no price")


class OrderRequest(Body):
    """A new order."""

    client_order_id: ClientOrderId
    account_id: AccountId
    symbol: Symbol
    side: Side
    quantity: int = Field(
        strict=True, gt=0, le=MAX_QUANTITY, description="Lots; shares of an odd lot."
    )
    price_type: PriceType = PriceType.LIMIT
    price: LimitPrice = None
    time_in_force: TimeInForce = TimeInForce.ROD
    lot: Lot = OrderLot.COMMON
    condition: Condition = OrderCondition.CASH
    open_close: OpenCloseType = OpenClose.AUTO
    price_rounding: OrderPriceRounding = Field(
        default=OrderPriceRounding.REFUSE,
        description="What becomes of a limit price between two steps of the symbol's prices:"
        " `refuse`, or `passive` for the next one that is no worse for you (down for a buy, up"
        " for a sale). Only where the steps are known.",
    )
    allow_duplicate: bool = Field(
        default=False,
        description="Place the order even if an identical one was placed within the duplicate "
        "window.",
    )

    @model_validator(mode="after")
    def _price_fits_its_type(self) -> Self:
        require_matching_price(self.price_type, self.price)
        return self

    @property
    def fingerprint(self) -> str:
        """The same for two bodies that ask for the same order, however the price is written."""
        parts = (
            self.account_id,
            self.symbol,
            self.side,
            str(self.quantity),
            self.price_type,
            plain_price(self.price),
            self.time_in_force,
            *special_terms(self.lot, self.condition, self.open_close),
        )
        if self.price_rounding is OrderPriceRounding.PASSIVE:
            parts += ("price_rounding=passive",)
        return sha256("|".join(parts).encode()).hexdigest()


class OrderStepView(View):
    """Describes one step in the life of an order."""

    step: str = Field(examples=["submitted"])
    at: datetime
    elapsed_ms: float = Field(description="Milliseconds since the order was accepted.")
    detail: str | None = None


class OrderView(View):
    """An order as it stands."""

    id: str
    client_order_id: str
    user_id: str
    account_id: str
    symbol: str
    side: Side
    quantity: int
    price_type: PriceType
    price: Price | None
    time_in_force: TimeInForce
    lot: OrderLot = OrderLot.COMMON
    condition: OrderCondition = OrderCondition.CASH
    open_close: OpenClose = OpenClose.AUTO
    state: OrderState
    final: bool = Field(description="The state will not change any more.")
    broker_order_id: str | None
    filled_quantity: int
    average_price: Price | None
    code: str | None = Field(description="Why it was not executed: a stable code.")
    reason: str | None
    reduce_only: bool = Field(default=False, description="It can only make a position smaller.")
    origin: str | None = Field(
        default=None,
        description="The request that created this order, if it was not a plain order.",
    )
    attention: str | None = Field(default=None, description="Why it needs attention.")
    accepted_at: datetime

    @property
    def special(self) -> str:
        """Lot, condition and type, where they are not the usual ones."""
        return " ".join(special_terms(self.lot, self.condition, self.open_close))


class OrderDetailView(OrderView):
    """An order with the steps of its life so far, in order of time."""

    timeline: list[OrderStepView]


RequestId = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9._:-]+$",
        max_length=64,
        description="Your own id of this request, unique for the order. A repeat has no effect, "
        "except that a failed cancel is sent again.",
    ),
]


class CancelRequest(Body):
    """Take an order back."""

    request_id: RequestId


class ReplaceRequest(Body):
    """Change a working order: a smaller quantity, another price, or both."""

    request_id: RequestId
    quantity: int | None = Field(
        default=None,
        strict=True,
        gt=0,
        le=MAX_QUANTITY,
        description="New total, in lots (shares of an odd lot): below the present one, and not "
        "below what is filled.",
    )
    price: OrderPrice | None = Field(default=None, description="New limit price.")

    @model_validator(mode="after")
    def _something_changes(self) -> Self:
        if self.quantity is None and self.price is None:
            raise ValueError("a change needs a quantity or a price")
        return self


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

OrderStateFilter = StrEnum(  # type: ignore[misc]
    "OrderStateFilter",
    {"OPEN": OPEN, "FINAL": FINAL, **{state.name: state.value for state in OrderState}},
)


PageCursor = Annotated[
    str | None,
    Field(
        pattern=r"^[A-Za-z0-9_-]+$", max_length=64, description="`next_cursor` of the page before."
    ),
]
Bom = Annotated[
    bool,
    Field(
        description="For spreadsheets: the file begins with a byte order mark, and its times "
        f"have no zone. They are in {HOME_ZONE_NAME}."
    ),
]
PageLimit = Annotated[int, Field(ge=1, le=500, description="Maximum number of orders per page.")]
NextCursor = Annotated[
    str | None,
    Field(description="`cursor` of the next page; null on the last page."),
]


class OrderFilter(BaseModel):
    """Selects orders. Unknown filters are refused: a misspelt one would show too much."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: list[OrderStateFilter] = Field(
        default=[],
        max_length=20,
        description="States, `open` or `final`; given several times: any of them.",
    )
    account: AccountId | None = None
    symbol: Symbol | None = None
    side: Side | None = None
    client_order_id: ClientOrderId | None = None
    since: QueryStart | None = Field(
        default=None,
        alias="from",
        description="Accepted at or after this time. A day begins at midnight in "
        f"{HOME_ZONE_NAME}.",
    )
    until: QueryEnd | None = Field(
        default=None,
        alias="to",
        description="Accepted before this time. A day counts as a whole: it ends at midnight in "
        f"{HOME_ZONE_NAME}.",
    )

    @model_validator(mode="after")
    def _times_are_in_order(self) -> Self:
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ValueError("`from` is not before `to`")
        return self

    def of(self, user_id: str | None) -> OrderSelection:
        """Returns the selection among the orders of this user; of all users if `user_id` is
        None."""
        same = self.model_dump(include={"symbol", "side", "client_order_id", "since", "until"})
        states = frozenset(state.value for state in self.state)
        return OrderSelection(user_id=user_id, states=states, account_id=self.account, **same)


class OrderQuery(OrderFilter):
    """Selects orders by a filter, and a page of them."""

    cursor: PageCursor = None
    limit: PageLimit = 100


class OrderExportQuery(OrderFilter):
    """Selects orders by a filter, and chooses the format of the file."""

    bom: Bom = False


class OrderPage(View):
    """Orders, the newest first."""

    orders: list[OrderView]
    next_cursor: NextCursor


class PresentOrders(View):
    """The open orders with which an event stream begins, the newest first."""

    user_id: str
    orders: list[OrderView]
    complete: bool = Field(description="False: there are more than these.")


def cursor_of(position: OrderPosition) -> str:
    """Returns a page's end as text: microseconds and the order's id."""
    at, order_id = position
    microseconds = (at - _EPOCH) // timedelta(microseconds=1)
    return (
        base64.urlsafe_b64encode(microseconds.to_bytes(8, "big") + order_id.bytes)
        .decode()
        .rstrip("=")
    )


def position_of(cursor: str) -> OrderPosition:
    """Raises `InvalidRequest` for a text that no page gave."""
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        if len(raw) != 24:
            raise ValueError
        at = _EPOCH + timedelta(microseconds=int.from_bytes(raw[:8], "big"))
    except (ValueError, OverflowError, binascii.Error):
        error = {
            "loc": ["query", "cursor"],
            "msg": "not a cursor of this list",
            "type": "value_error",
        }
        raise InvalidRequest(
            "query.cursor: use `next_cursor` of the page before", [error]
        ) from None
    return at, uuid.UUID(bytes=raw[8:])
