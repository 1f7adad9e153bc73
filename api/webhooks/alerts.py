"""Parses alerts and plans their orders: an order, a close, an entry or an exit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from api.http.problems import invalid_request
from api.orders.schemas import OrderRequest
from api.positions.closer import PositionClose
from api.positions.schemas import ClosePositionRequest, Intent, IntentRequest
from api.webhooks.schemas import Alert, AlertAction
from infra.database.trading.models import Webhook
from worker_runtime.protocol.messages import Side

_INTENTS = frozenset(intent.value for intent in Intent)

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class AlertPlan:
    """What is to be done for an alert."""

    #: Hash of all that tells this alert from others.
    digest: str
    #: Client order ids that its orders may have.
    ids: Sequence[str]
    what: OrderRequest | PositionClose | IntentRequest

    @property
    def client_order_id(self) -> str:
        return self.what.client_order_id


def parse_alert(body: bytes) -> Alert:
    """Raises `InvalidRequest`, which names fields and never shows a value: one is a secret."""
    try:
        return Alert.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error.errors(), "body") from None


def plan_of(alert: Alert, webhook: Webhook) -> AlertPlan:
    """Raises `InvalidRequest` for what its kind of order cannot be."""
    digest = _digest(alert, webhook)
    # An intent's id has at most 48 characters, because its orders' ids are longer.
    name = f"webhook-{digest[: 48 if alert.plain else 40]}"
    priced = {
        "client_order_id": name,
        "quantity": alert.quantity,
        "price_type": alert.price_type,
        "price": alert.price,
        "time_in_force": alert.time_in_force,
    }
    if alert.action.value in _INTENTS:
        intent = _checked(IntentRequest, intent=alert.action.value, symbol=alert.symbol, **priced)
        return AlertPlan(digest=digest, ids=(f"{name}.close", f"{name}.open"), what=intent)
    body = _checked(ClosePositionRequest, **priced)
    if alert.plain:
        assert alert.quantity is not None  # seen to by the schema  # noqa: S101
        side = Side(alert.action.value)
        order = body.order(name, webhook.account_id, alert.symbol, side, alert.quantity)
        return AlertPlan(digest=digest, ids=(name,), what=order)
    long = None if alert.action is AlertAction.CLOSE else alert.action is AlertAction.SELL
    close = PositionClose.of(body, webhook.user_id, webhook.account_id, alert.symbol, actor_of(webhook), long)
    return AlertPlan(digest=digest, ids=(name,), what=close)


def actor_of(webhook: Webhook) -> str:
    return f"webhook:{webhook.id}"


def _digest(alert: Alert, webhook: Webhook) -> str:
    price = "" if alert.price is None else format(alert.price.normalize(), "f")
    said = [
        *(str(webhook.id), f"{alert.time.timestamp():.6f}", alert.action.value, alert.symbol),
        *("" if alert.quantity is None else alert.quantity, alert.price_type, price),
        *(alert.time_in_force or "", alert.id),
    ]
    if alert.reduce_only:  # only then, so that digests from before this field stay the same
        said.append("reduce_only")
    # As a list: no value can pass for a part of the next one.
    return sha256(json.dumps(said).encode()).hexdigest()


def _checked(model: type[M], **fields: Any) -> M:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid_request(error.errors(), "body") from None
