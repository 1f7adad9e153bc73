"""Contains the bodies that attackers send, and what they could have changed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select

from infra.database.models import Base, Order, StoredCredentials
from tests.support.systems.api import ServedApi, an_order

IMAGE = "registry.example/worker@sha256:" + "ab" * 32
CREDENTIALS = {"broker": "paper", "api_key": "evil", "secret_key": "evil"}


def attack_body(route: str) -> dict[str, Any]:
    """Returns a body with which the route would do something."""
    bodies: dict[str, dict[str, Any]] = {
        "credentials": CREDENTIALS,
        "orders": an_order(),
        "webhooks": {"account_id": "main", "quantity_unit": "lots"},
        "limits": {"max_quantity": 1},
        "statement-addresses": {"email": "evil@example.com"},
        "switches": {"scope": "all", "state": "open", "reason": "evil"},
        "api-keys": {"role": "admin", "label": "evil"},
        "images": {"image": IMAGE},
        "users": {"user_id": "evil"},
        "rollout": {"version": "2", "image": IMAGE},
        "jobs": {"job": {"type": "ping", "text": "evil"}},
        "{user_id}/jobs": {"job": {"type": "statement", "day": "2026-11-20"}},
        "replace": {"request_id": "evil", "price": "1000"},
        "cancel": {"request_id": "evil"},
        "close": {"client_order_id": "evil", "price_type": "MKT"},
        "intents": {
            "client_order_id": "evil",
            "intent": "long_entry",
            "symbol": "2330",
            "quantity": 1,
        },
    }
    *_, before, last = route.split("/")
    return bodies.get(f"{before}/{last}", bodies.get(last, {}))


async def stored_state(api: ServedApi) -> dict[str, Any]:
    """Returns all that a request could have changed: the row counts, credentials and orders."""
    async with api.services.database.session() as session:
        counts = {
            table.name: await session.scalar(select(func.count()).select_from(table))
            for table in Base.metadata.sorted_tables
            if table.name
            != "daily_acts"  # counts what anybody has asked for, also what was refused
        }
        stored = (await session.scalars(select(StoredCredentials).order_by("user_id"))).all()
        orders = (await session.scalars(select(Order))).all()
    return {
        **counts,
        "credentials": [
            (credential.user_id, credential.version, credential.ciphertext) for credential in stored
        ],
        "orders": {
            order.id: (order.state, order.price, order.quantity, order.attention)
            for order in orders
        },
    }
