"""Contains accounts and orders that tests write into PostgreSQL, and events of these orders."""

from __future__ import annotations

from datetime import date

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from infra.database import accounts
from infra.database.engine import Database
from infra.database.orders.acceptance import NewOrder
from infra.vault import vault
from infra.vault.key_pairs import MasterKeyRing
from worker_runtime.protocol.messages import Credentials, OrderEvent, OrderState

SECRET = Credentials(api_key="canary", secret_key="canary")


RING = MasterKeyRing(X25519PrivateKey.generate())


async def put_account(database: Database, *, session_user: str, session: object) -> int:
    encrypted = await vault.encrypt_credentials(
        SECRET, RING.public, user_id=session_user, account_id="main"
    )
    return await accounts.put_account(
        session,  # type: ignore[arg-type]
        user_id=session_user,
        account_id="main",
        broker="paper",
        broker_type="stock",
        simulation=True,
        encrypted=encrypted,
    )


def make_new_order(
    client_order_id: str = "c-1", fingerprint: str = "f", account_id: str = "main"
) -> NewOrder:
    return NewOrder(
        user_id="42",
        account_id=account_id,
        client_order_id=client_order_id,
        fingerprint=fingerprint,
        symbol="2330",
        side="buy",
        quantity=2,
        price_type="MKT",
        price=None,
        time_in_force="IOC",
        generation="g",
        lifetime_s=30.0,
        trading_day=date(2026, 11, 23),
    )


def make_order_event(
    order_id: str, event_id: str, state: OrderState, filled: int = 0
) -> OrderEvent:
    return OrderEvent(
        event_id=event_id,
        order_id=order_id,
        user_id="42",
        epoch=1,
        state=state,
        at_ms=1_795_410_000_000,
        filled_quantity=filled,
    )
