"""Webhooks, and the alerts that come to them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
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
    model_validator,
)

from api.http.fields import AccountId, Body, View, examples
from api.orders.schemas import MAX_QUANTITY, ORDER_VIEW_EXAMPLE, OrderPrice, OrderView, Symbol
from worker_runtime.protocol.messages import PriceType, TimeInForce

_EXAMPLE: dict[str, Any] = {
    "id": "0b0f5b1c-6c1d-4a53-9a57-0d7f3c1b2a11",
    "user_id": "alice",
    "account_id": "9A95-0123456",
    "sources": ["52.89.214.238", "34.212.75.30", "54.218.53.128", "52.32.178.7"],
    "window_s": 60,
    "created_at": "2026-11-21T01:00:00.000000Z",
    "revoked_at": None,
}


def _network(text: str) -> str:
    return str(ip_network(text, strict=False))


class WebhookRequest(Body):
    """A new place to which alerts may be posted."""

    model_config = examples({name: _EXAMPLE[name] for name in ("account_id", "sources", "window_s")})

    account_id: AccountId
    sources: Annotated[
        tuple[Annotated[str, Field(max_length=64), AfterValidator(_network)], ...],
        Field(max_length=32, description="Addresses or networks that may post; empty: all."),
    ] = ()
    window_s: Annotated[
        int, Field(ge=1, le=3600, description="Seconds that an alert's own time may differ from ours.")
    ] = 60


class WebhookView(View):
    """A webhook, without what opens it."""

    model_config = examples(_EXAMPLE)

    id: UUID
    user_id: str
    account_id: str
    sources: list[str]
    window_s: int
    created_at: datetime
    revoked_at: datetime | None


class WebhookWithSecretsView(WebhookView):
    """A new webhook. Token and secret are shown this once."""

    model_config = examples(
        {**_EXAMPLE, "token": "tN0…", "secret": "q7E…", "path": "/v1/webhooks/tN0…/orders"}
    )

    token: str
    secret: Annotated[str, Field(description="Goes into the body of every alert.")]
    path: Annotated[str, Field(description="Where alerts are posted.")]


class WebhookList(View):
    """A user's webhooks, the newest first."""

    model_config = examples({"webhooks": [_EXAMPLE]})

    webhooks: list[WebhookView]


class AlertAction(StrEnum):
    """What an alert asks for: an order, or what a strategy wants."""

    BUY = "buy"
    SELL = "sell"
    LONG_ENTRY = "long_entry"
    LONG_EXIT = "long_exit"
    SHORT_ENTRY = "short_entry"
    SHORT_EXIT = "short_exit"
    CLOSE = "close"


#: Actions that open something, and so have to say how much.
_OPENS = frozenset({AlertAction.BUY, AlertAction.SELL, AlertAction.LONG_ENTRY, AlertAction.SHORT_ENTRY})


def _whole(value: object) -> object:
    """TradingView writes a quantity as a number or as text, and 1 as `1.0`, too."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and len(value) <= 16:
        whole, _, rest = value.partition(".")
        if whole.isascii() and whole.isdigit() and not rest.strip("0"):
            return int(whole)
    return value


class Alert(BaseModel):
    """What an alert says. Other fields are left alone: alerts carry more than we need."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        json_schema_extra={
            "examples": [
                {
                    "secret": "q7E…",
                    "time": "{{timenow}}",
                    "action": "{{strategy.order.action}}",
                    "symbol": "{{ticker}}",
                    "quantity": "{{strategy.order.contracts}}",
                    "id": "{{strategy.order.id}}",
                }
            ]
        },
    )

    secret: Annotated[str, Field(min_length=1, max_length=256, repr=False)]
    time: Annotated[AwareDatetime, Field(description="When the alert was sent, with a zone.")]
    action: AlertAction
    symbol: Symbol
    quantity: Annotated[
        Annotated[int, Field(strict=True, gt=0, le=MAX_QUANTITY)] | None,
        BeforeValidator(_whole),
        Field(description="Lots. `close` and exits without it close all of the position."),
    ] = None
    reduce_only: Annotated[
        bool,
        Field(
            strict=True,
            description="With `buy` and `sell`: close a position on the other side, of at least `quantity`.",
        ),
    ] = False
    price_type: PriceType = PriceType.MARKET
    price: OrderPrice | None = None
    time_in_force: TimeInForce | None = Field(
        default=None, description="IOC for market orders and ROD for limit orders, unless it is given."
    )
    id: Annotated[
        str,
        Field(max_length=128, description="Tells alerts apart that are otherwise the same, also in time."),
    ] = ""

    @model_validator(mode="after")
    def _fits_its_action(self) -> Self:
        opens = self.action in _OPENS
        if opens and self.quantity is None:
            raise ValueError("this action needs a quantity")
        if self.reduce_only and self.action in (AlertAction.LONG_ENTRY, AlertAction.SHORT_ENTRY):
            raise ValueError("an entry does not only reduce")
        return self

    @property
    def plain(self) -> bool:
        """An order as it stands, whatever the positions are."""
        return self.action in (AlertAction.BUY, AlertAction.SELL) and not self.reduce_only


class AlertOutcome(View):
    """How far an alert has come that is more than one plain order."""

    model_config = examples(
        {
            "client_order_id": "webhook-5f0c…",
            "action": "long_entry",
            "legs": [ORDER_VIEW_EXAMPLE],
            "complete": True,
        }
    )

    client_order_id: str
    action: AlertAction
    legs: Annotated[list[OrderView], Field(description="Its orders so far, the closing one first.")]
    complete: Annotated[bool, Field(description="False: it goes on without the caller.")]
