"""What a real exchange does not list, and still has: such an order is never called rejected."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from redis.asyncio import Redis
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities.orders.verification import AccountQueryClient, OrderActivities
from infra.database.engine import Database
from infra.database.models import Order
from infra.exchange.behaviour import Behaviour
from infra.exchange.client import ExchangeAdmin, ExchangeServer
from infra.local.servers import TemporalServer
from infra.settings import Settings
from infra.temporal.starter import WorkerStarter
from infra.vault.key_pairs import MasterKeyRing
from tests.support.message_signing import SECRETS
from tests.support.orders.sweeper import SweeperHarness
from tests.support.workers.reporting_worker import ReportingWorker
from worker_runtime.brokers.paper.broker import PaperBroker
from worker_runtime.protocol.messages import (
    Credentials,
    OrderState,
    PlaceOrder,
    PriceType,
    Side,
    TimeInForce,
)
from workflows.order.messages import FollowSettings, VerificationFinding, Verified, VerifyOrder
from workflows.order.state import FollowedOrder, OrderStep

#: The rule of a minute in short, so that a listing that is seconds behind is one that lags longer.
SHORT = FollowSettings(
    first_pause=0.05, longest_pause=0.1, absent_after=0.5, absent_after_alive=0.5
)
FAR = 4e9


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExchangeServer]:
    directory: Path = tmp_path_factory.mktemp("exchange")
    with ExchangeServer(directory, options=("--queries-per-5s", "1000")) as server:
        yield server


@dataclass
class AbsenceScenario:
    """A user's harness, and two of their sessions at the exchange: the order's, and the one that is
    asked."""

    harness: SweeperHarness
    exchange: ExchangeServer
    earlier: PaperBroker
    asked: PaperBroker

    @property
    def account(self) -> str:
        return self.harness.user_id

    async def behave(self, behaviour: Behaviour) -> None:
        async with ExchangeAdmin(self.exchange.admin_url) as admin:
            await admin.set_behaviour(self.account, behaviour)

    async def unknown(self, *, sent: bool = True) -> uuid.UUID:
        """An order whose answer was lost; without `sent`, it had never left the worker."""
        order_id = await self.harness.order(seconds_left=-1.0, state="unknown")
        if sent:
            row = await self.harness.row(order_id)
            self.earlier.place(
                PlaceOrder(
                    request_id=str(order_id),
                    order_id=str(order_id),
                    user_id=self.harness.user_id,
                    account_id="main",
                    symbol="2330",
                    side=Side.BUY,
                    quantity=2,
                    price_type=PriceType.MARKET,
                    price=None,
                    time_in_force=TimeInForce.IOC,
                    tag=row.tag,
                    reply_to="",
                    generation="",
                ),
                5.0,
            )
        return order_id

    async def check(self, order_id: uuid.UUID) -> Verified:
        asking = AccountQueryClient(
            self.harness.client,
            self.harness.database,
            WorkerStarter(self.harness.temporal, self.harness.settings),
            SECRETS,
        )
        verifying = OrderActivities(self.harness.client, self.harness.database, asking, SECRETS)
        request = VerifyOrder(
            order_id=str(order_id), user_id=self.harness.user_id, check=0, timeout=20.0
        )
        return await ActivityEnvironment().run(verifying.verify_order, request)

    async def follow(
        self,
        order_id: uuid.UUID,
        meanwhile: Callable[[FollowedOrder], Awaitable[None]] | None = None,
    ) -> FollowedOrder:
        """Checks, as its workflow does, until the order is final, called absent, or a person's.

        `meanwhile`: what a test does after each check.
        """
        follow = FollowedOrder()
        worker = ReportingWorker(self.harness.client, self.harness.user_id)
        worker.broker = lambda: self.asked.orders(5.0)
        async with worker:
            while follow.step(time.time(), FAR) == OrderStep.WAIT:
                follow = follow.after_check(await self.check(order_id), time.time(), SHORT)
                if follow.concern(time.time(), FAR, SHORT):
                    break
                if meanwhile is not None:
                    await meanwhile(follow)
        return follow

    async def in_ledger(self, order_id: uuid.UUID) -> bool:
        async with ExchangeAdmin(self.exchange.admin_url) as admin:
            return str(order_id) in [
                order.client_note for order in await admin.ledger(self.account)
            ]


@pytest.fixture
async def scenario(
    valkey_client: Redis,
    migrated_database: str,
    temporal_server: TemporalServer,
    exchange: ExchangeServer,
) -> AsyncIterator[AbsenceScenario]:
    database = Database(migrated_database)
    temporal = await Client.connect(temporal_server.address)
    harness = SweeperHarness(
        valkey_client, database, temporal, Settings(database_url=migrated_database)
    )
    await harness.prepare(MasterKeyRing(X25519PrivateKey.generate()))
    async with ExchangeAdmin(exchange.admin_url) as admin:
        await admin.register(harness.user_id, "k", "s")
    sessions = [
        PaperBroker(exchange.address, harness.user_id, "test", lambda change: None)
        for _ in range(2)
    ]
    for session in sessions:
        session.login(Credentials(api_key="k", secret_key="s"), 5.0)
    yield AbsenceScenario(harness, exchange, *sessions)
    for session in sessions:
        session.close()
    await harness.end()
    await database.close()


async def test_an_order_that_a_lagging_list_does_not_show_yet_is_waited_for(
    scenario: AbsenceScenario,
) -> None:
    """For as long as that would be proof, if the list were not behind; then it shows it."""
    await scenario.behave(Behaviour(listing_lag_ms=60_000))
    order_id = await scenario.unknown()
    enough = time.monotonic() + 3 * SHORT.absent_after_alive

    async def catches_up(follow: FollowedOrder) -> None:
        if follow.checks >= 5 and time.monotonic() > enough:
            await scenario.behave(Behaviour())

    follow = await scenario.follow(order_id, catches_up)
    assert (follow.step(time.time(), FAR), follow.state) == (OrderStep.END, "filled")
    assert "the broker does not list it" in follow.story[0]
    assert (await scenario.harness.row(order_id)).filled_quantity == 2


async def test_an_order_that_a_lagging_list_would_show_by_now_was_never_there(
    scenario: AbsenceScenario,
) -> None:
    await scenario.behave(Behaviour(listing_lag_ms=1_000))
    order_id = await scenario.unknown(sent=False)
    follow = await scenario.follow(order_id)
    assert (follow.step(time.time(), FAR), follow.state) == (OrderStep.SETTLE, "unknown")
    assert not await scenario.in_ledger(order_id)


async def test_a_list_that_is_ninety_seconds_behind_proves_nothing_after_sixty(
    scenario: AbsenceScenario,
) -> None:
    await scenario.behave(Behaviour(listing_lag_ms=90_000))
    order_id = await scenario.unknown()
    worker = ReportingWorker(scenario.harness.client, scenario.harness.user_id)
    worker.broker = lambda: scenario.asked.orders(5.0)
    async with worker:
        seen = await scenario.check(order_id)
    assert (seen.finding, seen.certain) == (VerificationFinding.MISSING, True)
    assert seen.behind >= 90
    follow, quiet = FollowedOrder(), seen.quiet_since
    for later in (60.0, 90.0, 119.0, 121.0, 149.0):
        follow = follow.after_check(seen, quiet + later, FollowSettings())
        assert follow.step(quiet + later, FAR) == OrderStep.WAIT
    assert await scenario.in_ledger(order_id)


@pytest.mark.parametrize(
    "behaviour",
    [Behaviour(lists_own_session_only=True), Behaviour(listing_untold=True, listing_lag_ms=90_000)],
)
async def test_where_the_list_may_leave_out_the_order_a_person_decides(
    scenario: AbsenceScenario, behaviour: Behaviour
) -> None:
    await scenario.behave(behaviour)
    order_id = await scenario.unknown()
    follow = await scenario.follow(order_id)
    assert follow.step(time.time(), FAR) == OrderStep.WAIT
    assert "does not prove" in follow.concern(time.time(), FAR, SHORT)
    assert await scenario.in_ledger(order_id)
    assert (await scenario.harness.row(order_id)).state == OrderState.UNKNOWN


async def test_an_order_older_than_what_the_list_reaches_back_to_is_a_persons(
    scenario: AbsenceScenario,
) -> None:
    """Past midnight the exchange lists the new day's orders only."""
    order_id = await scenario.unknown(sent=False)
    async with scenario.harness.database.session() as session:
        row = await session.get_one(Order, order_id)
        row.created_at = datetime(2026, 1, 5, tzinfo=UTC)
    follow = await scenario.follow(order_id)
    assert "does not prove" in follow.concern(time.time(), FAR, SHORT)
