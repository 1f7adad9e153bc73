"""Webhooks, and the signals that come to them: what they say, and the orders that are planned of them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from ipaddress import ip_network
from typing import Annotated, Any, Self
from uuid import UUID

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from api.http.fields import AccountId, Body, View, plain_price, with_examples
from api.http.problems import invalid_request
from api.orders.schemas import (
    MAX_QUANTITY,
    Lot,
    OpenCloseType,
    OrderPrice,
    OrderRequest,
    OrderView,
    Symbol,
    special_terms,
)
from api.positions.closer import PositionClose
from api.positions.parts import part_ids
from api.positions.schemas import AnyCondition, ClosePositionRequest, Intent, IntentRequest, PricedBody
from infra.database.trading.models import Webhook
from worker_runtime.protocol.messages import PriceType, Side, TimeInForce
from worker_runtime.protocol.order_terms import OpenClose, OrderLot


def _network(text: str) -> str:
    return str(ip_network(text, strict=False))


class WebhookRequest(Body):
    """A new place to which signals may be posted."""

    account_id: AccountId
    sources: tuple[Annotated[str, Field(max_length=64), AfterValidator(_network)], ...] = Field(
        default=(), max_length=32, description="Addresses or networks that may post; empty: all."
    )
    window_s: int = Field(
        default=60, ge=1, le=3600, description="Seconds that a signal's own time may differ from ours."
    )


class WebhookView(View):
    """A webhook, without what opens it."""

    id: UUID
    user_id: str
    account_id: str
    sources: list[str]
    window_s: int
    created_at: datetime
    revoked_at: datetime | None


class WebhookWithSecretsView(WebhookView):
    """A new webhook. Token and secret are shown this once."""

    token: str
    secret: str = Field(description="Goes into the body of every signal.")
    path: str = Field(description="Where signals are posted.")


class WebhookList(View):
    """A user's webhooks, the newest first."""

    webhooks: list[WebhookView]


class SignalAction(StrEnum):
    """What a signal asks for: an order, or what a strategy wants."""

    BUY = "buy"
    SELL = "sell"
    LONG_ENTRY = "long_entry"
    LONG_EXIT = "long_exit"
    SHORT_ENTRY = "short_entry"
    SHORT_EXIT = "short_exit"
    CLOSE = "close"


#: Actions that open something, and so have to say how much.
_OPENS = frozenset({SignalAction.BUY, SignalAction.SELL, SignalAction.LONG_ENTRY, SignalAction.SHORT_ENTRY})


def _whole(value: object) -> object:
    """TradingView writes a quantity as a number or as text, and 1 as `1.0`, too."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and len(value) <= 16:
        whole, _, rest = value.partition(".")
        if whole.isascii() and whole.isdigit() and not rest.strip("0"):
            return int(whole)
    return value


class Signal(BaseModel):
    """What a signal says. Other fields are left alone: signals carry more than we need."""

    model_config = ConfigDict(frozen=True, extra="ignore", json_schema_extra=with_examples)

    secret: str = Field(min_length=1, max_length=256, repr=False)
    time: AwareDatetime = Field(description="When the signal was sent, with a zone.")
    action: SignalAction
    symbol: Symbol
    quantity: Annotated[
        Annotated[int, Field(strict=True, gt=0, le=MAX_QUANTITY)] | None, BeforeValidator(_whole)
    ] = Field(default=None, description="Lots. `close` and exits without it close all of the position.")
    reduce_only: bool = Field(
        default=False,
        strict=True,
        description="With `buy` and `sell`: close a position on the other side, of at least `quantity`.",
    )
    price_type: PriceType = PriceType.MARKET
    price: OrderPrice | None = None
    time_in_force: TimeInForce | None = Field(
        default=None, description="IOC for market orders and ROD for limit orders, unless it is given."
    )
    lot: Lot = OrderLot.COMMON
    condition: AnyCondition = None
    open_close: OpenCloseType = OpenClose.AUTO
    id: str = Field(
        default="",
        max_length=128,
        pattern=r"^[^\x00]*$",  # PostgreSQL takes no NUL
        description="Tells signals apart that are otherwise the same, also in time.",
    )

    @model_validator(mode="after")
    def _fits_its_action(self) -> Self:
        opens = self.action in _OPENS
        if opens and self.quantity is None:
            raise ValueError("this action needs a quantity")
        if self.reduce_only and self.action in (SignalAction.LONG_ENTRY, SignalAction.SHORT_ENTRY):
            raise ValueError("an entry does not only reduce")
        return self

    @property
    def plain(self) -> bool:
        """An order as it stands, whatever the positions are."""
        return self.action in (SignalAction.BUY, SignalAction.SELL) and not self.reduce_only


class SignalOutcome(View):
    """How far a signal has come that is more than one plain order."""

    client_order_id: str
    action: SignalAction
    legs: list[OrderView] = Field(description="Its orders so far, the closing one first.")
    complete: bool = Field(description="False: it goes on without the caller.")


_INTENTS = frozenset(intent.value for intent in Intent)


@dataclass(frozen=True, kw_only=True)
class SignalPlan:
    """What is to be done for a signal."""

    #: Hash of all that tells this signal from others.
    digest: str
    #: Client order ids that its orders may have.
    ids: Sequence[str]
    what: OrderRequest | PositionClose | IntentRequest

    @property
    def client_order_id(self) -> str:
        return self.what.client_order_id


@contextmanager
def _refusing_body() -> Iterator[None]:
    """Raises `InvalidRequest`, which names fields and never shows a value: one is a secret."""
    try:
        yield
    except ValidationError as error:
        raise invalid_request(error.errors(), "body") from None


@_refusing_body()
def parse_signal(body: bytes) -> Signal:
    return Signal.model_validate_json(body)


@_refusing_body()
def plan_of(signal: Signal, webhook: Webhook) -> SignalPlan:
    """Raises `InvalidRequest` for what its kind of order cannot be."""
    digest = _digest(signal, webhook)
    # An intent's id has at most 48 characters, because its orders' ids are longer.
    name = f"webhook-{digest[: 48 if signal.plain else 40]}"
    priced: dict[str, Any] = {"client_order_id": name, "quantity": signal.quantity}
    priced |= {field: getattr(signal, field) for field in PricedBody.model_fields}
    if signal.action.value in _INTENTS:
        intent = IntentRequest(intent=Intent(signal.action.value), symbol=signal.symbol, **priced)
        return SignalPlan(digest=digest, ids=(*part_ids(f"{name}.close"), f"{name}.open"), what=intent)
    body = ClosePositionRequest(**priced)
    if signal.plain:
        assert signal.quantity is not None  # seen to by the schema  # noqa: S101
        side = Side(signal.action.value)
        order = body.order(name, webhook.account_id, signal.symbol, side, signal.quantity)
        return SignalPlan(digest=digest, ids=(name,), what=order)
    long = None if signal.action is SignalAction.CLOSE else signal.action is SignalAction.SELL
    close = PositionClose.of(
        body, webhook.user_id, webhook.account_id, signal.symbol, actor_of(webhook), long
    )
    return SignalPlan(digest=digest, ids=part_ids(name), what=close)


def actor_of(webhook: Webhook) -> str:
    return f"webhook:{webhook.id}"


def _digest(signal: Signal, webhook: Webhook) -> str:
    said = [
        *(str(webhook.id), f"{signal.time.timestamp():.6f}", signal.action.value, signal.symbol),
        *("" if signal.quantity is None else signal.quantity, signal.price_type, plain_price(signal.price)),
        *(signal.time_in_force or "", signal.id),
    ]
    said += special_terms(signal.lot, signal.condition, signal.open_close)
    if signal.reduce_only:  # only then, so that digests from before this field stay the same
        said.append("reduce_only")
    # As a list: no value can pass for a part of the next one.
    return sha256(json.dumps(said).encode()).hexdigest()
