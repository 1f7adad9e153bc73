"""Contains reports of accounts, and the comparisons that follow."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from redis.asyncio import Redis
from sqlalchemy import text
from temporalio.client import Client

from activities.events.recorder import Recorder
from infra.database.engine import Database
from infra.database.trading import reconciliations
from infra.database.trading.models import Reconciliation
from infra.local.servers import TemporalServer
from infra.settings import Settings
from infra.vault.key_pairs import MasterKeyRing
from tests.support.orders.sweeper import SweeperHarness
from worker_runtime.protocol.broker_reports import BrokerOrder, Position
from worker_runtime.protocol.messages import AccountReported
from worker_runtime.protocol.requests import AccountReport, encode_report


@asynccontextmanager
async def open_books(
    valkey_client: Redis, database_url: str, temporal_server: TemporalServer
) -> AsyncIterator[SweeperHarness]:
    """Yields the harness of a user whose account is compared with the broker's."""
    database = Database(database_url)
    temporal = await Client.connect(temporal_server.address)
    harness = SweeperHarness(valkey_client, database, temporal, Settings(database_url=database_url))
    await harness.prepare(MasterKeyRing(X25519PrivateKey.generate()))
    yield harness
    await database.close()


def make_position(symbol: str, lots: int, odd_shares: int = 0) -> Position:
    return Position(symbol=symbol, quantity=lots, average_price=Decimal(100), odd_shares=odd_shares)


async def record_account_report(
    harness: SweeperHarness,
    *positions: Position,
    orders: tuple[BrokerOrder, ...] = (),
    complete: bool = True,
    certain: bool = True,
    ago: float = 0.0,
    blocks: bool = False,
    epoch: int = 1,
    odd_shown: bool = True,
) -> AccountReported:
    """Records what a session reports after its login."""
    now = int((time.time() - ago) * 1000)
    account_report = AccountReport(
        account_id="main",
        taken_at_ms=now,
        complete=complete,
        absence_certain=certain,
        orders=list(orders),
        positions=list(positions),
        odd_shown=odd_shown,
    )
    event = AccountReported(
        worker_id="w",
        user_id=harness.user_id,
        account_id="main",
        epoch=epoch,
        at_ms=now,
        report=encode_report(account_report),
    )
    await Recorder(harness.database, differences_block=blocks).handle([event])
    return event


async def list_reconciliations(harness: SweeperHarness) -> list[Reconciliation]:
    async with harness.database.session() as session:
        return list(await reconciliations.reconciliations_of_user(session, harness.user_id))


async def age_orders(harness: SweeperHarness) -> None:
    """Makes all orders 5 minutes older, as if nothing had happened to them since."""
    async with harness.database.session() as session:
        await session.execute(
            text("update orders set updated_at = updated_at - interval '5 minutes'")
        )


async def write_filled_order(
    harness: SweeperHarness, lots: int = 2, broker_order_id: str = "B-1"
) -> uuid.UUID:
    order_id = await harness.order(
        due=False,
        state="filled",
        filled_quantity=lots,
        broker_order_id=broker_order_id,
        verify_at=None,
    )
    await age_orders(harness)
    return order_id


async def resolve_difference(harness: SweeperHarness, row: Reconciliation) -> None:
    async with harness.database.session() as session:
        await reconciliations.resolve_reconciliation(
            session, row.id, actor="key:7", reason="bought by hand"
        )
