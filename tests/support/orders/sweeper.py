"""A harness for orders that nobody follows: PostgreSQL, Valkey, Temporal, and orders in any state.

`python -m tests.support.orders.sweeper DATABASE VALKEY TEMPORAL LEASE` is a sweeper
to be killed.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from redis.asyncio import Redis
from sqlalchemy import update
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.orders.sweeper import OrderSweeper
from infra.database import accounts, users
from infra.database.engine import Database
from infra.database.models import Order
from infra.database.orders import acceptance, recording
from infra.database.orders.acceptance import NO_BOUNDS, OrderBounds
from infra.market.calendar import HOME_ZONE
from infra.settings import Settings
from infra.temporal.starter import WorkerStarter
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.vault import vault
from infra.vault.key_pairs import MasterKeyRing
from tests.support.message_signing import SECRETS
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import Credentials
from workflows.names import order_id as order_id_of
from workflows.names import user_worker_id

GENERATION = "generation-1"


@dataclass
class SweeperHarness:
    client: Redis
    database: Database
    temporal: Client
    settings: Settings
    user_id: str = ""
    #: All orders that were made.
    ordered: list[uuid.UUID] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.user_id = f"u{uuid.uuid4().hex[:8]}"

    async def prepare(self, ring: MasterKeyRing) -> None:
        await valkey.ensure_generation(self.client, GENERATION)
        credentials = Credentials(api_key="k", secret_key="s")
        encrypted = await vault.encrypt_credentials(
            credentials, ring.public, user_id=self.user_id, account_id="main"
        )
        async with self.database.session() as session:
            await users.create_user(session, self.user_id)
            await accounts.put_account(
                session,
                user_id=self.user_id,
                account_id="main",
                broker="paper",
                broker_type="stock",
                simulation=True,
                encrypted=encrypted,
            )

    def sweeper(self, **options: Any) -> OrderSweeper:
        ensuring = WorkerStarter(self.temporal, self.settings)
        return OrderSweeper(
            self.client, self.database, self.temporal, ensuring, self.settings, SECRETS, **options
        )

    async def order(
        self,
        *,
        seconds_left: float = 30.0,
        due: bool = True,
        generation: str = GENERATION,
        bounds: OrderBounds = NO_BOUNDS,
        **columns: Any,
    ) -> uuid.UUID:
        """Stores an order with `seconds_left` to its deadline; `due`: the sweeper has to look at it
        now."""
        new = acceptance.NewOrder(
            user_id=self.user_id,
            account_id="main",
            client_order_id=uuid.uuid4().hex,
            fingerprint="f",
            symbol="2330",
            side="buy",
            quantity=2,
            price_type="MKT",
            price=None,
            time_in_force="IOC",
            generation=generation,
            lifetime_s=seconds_left,
            trading_day=datetime.now(HOME_ZONE).date(),
            unknown_blocks="off",
        )
        async with self.database.session() as session:
            order_id = (await acceptance.accept_order(session, new, bounds)).order.id
            self.ordered.append(order_id)
            if due:
                columns["verify_at"] = datetime.now(UTC) - timedelta(seconds=1)
            if columns:
                await session.execute(update(Order).where(Order.id == order_id).values(**columns))
        return order_id

    async def row(self, order_id: uuid.UUID) -> Order:
        async with self.database.session() as session:
            return await recording.get_order(session, order_id)

    async def queued(self) -> list[bytes]:
        items: list[bytes] = await reply_of(self.client.lrange(keys.requests(self.user_id), 0, -1))
        return items

    async def mark(self) -> None:
        """A worker seems to be alive, so that nobody starts one."""
        await self.client.set(keys.mark(self.user_id), "1:w")

    async def followed(self, order_id: uuid.UUID) -> bool:
        """Whether the order's workflow runs."""
        return await self.running(f"order-{order_id}")

    async def rechecks(self, order_id: uuid.UUID) -> int:
        """How often the order's workflow was asked to check at once."""
        handle = self.temporal.get_workflow_handle(f"order-{order_id}")
        events = [event async for event in handle.fetch_history_events()]
        return sum(
            event.HasField("workflow_execution_signaled_event_attributes") for event in events
        )

    async def end(self) -> None:
        """The workflows that were started for the user and the orders: nobody runs them here, and a
        worker of a later test on the same Temporal would."""
        workflow_ids = {user_worker_id(self.user_id), *map(order_id_of, map(str, self.ordered))}
        for workflow_id in workflow_ids:
            with suppress(RPCError):  # as a rule there is none
                await self.temporal.get_workflow_handle(workflow_id).terminate("the test is over")

    async def running(self, workflow_id: str) -> bool:
        try:
            execution = await self.temporal.get_workflow_handle(workflow_id).describe()
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return False
            raise
        return execution.status == WorkflowExecutionStatus.RUNNING


async def main(database_url: str, valkey_url: str, temporal_address: str, lease: float) -> None:
    database = Database(database_url)
    temporal = await Client.connect(temporal_address)
    settings = Settings(database_url=database_url)
    ensuring = WorkerStarter(temporal, settings)
    sweeper = OrderSweeper(
        valkey.connect_valkey(valkey_url),
        database,
        temporal,
        ensuring,
        settings,
        SECRETS,
        lease=lease,
    )
    await sweeper.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
