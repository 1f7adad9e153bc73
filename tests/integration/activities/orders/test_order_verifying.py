"""One check of an order: events first, then the broker's list, and what its silence proves."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from msgspec import structs
from redis.asyncio import Redis
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities.orders.verification import AccountQueryClient, OrderActivities
from infra.database.engine import Database
from infra.database.orders import recording
from infra.database.workers import sessions as worker_sessions
from infra.local.servers import TemporalServer
from infra.settings import Settings
from infra.temporal.starter import WorkerStarter
from infra.valkey.client import reply_of
from infra.vault.key_pairs import MasterKeyRing
from tests.support.databases import assign_launched_worker
from tests.support.message_signing import SECRETS, worker_answer
from tests.support.orders.sweeper import SweeperHarness
from tests.support.workers.reporting_worker import ReportingWorker
from worker_runtime.protocol import keys
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.errors import SessionDown, WorkerUnavailable
from worker_runtime.protocol.messages import (
    Answer,
    Fill,
    OrderEvent,
    OrderOutcome,
    OrderState,
    PriceType,
    Side,
    TimeInForce,
)
from workflows.order.messages import UnresolvedOrder, VerificationFinding, Verified, VerifyOrder


@pytest.fixture
async def harness(
    valkey_client: Redis, migrated_database: str, temporal_server: TemporalServer
) -> AsyncIterator[SweeperHarness]:
    database = Database(migrated_database)
    temporal = await Client.connect(temporal_server.address)
    settings = Settings(
        database_url=migrated_database, claim_timeout=0.5, launch_timeout=0.1, connect_timeout=0.5
    )
    harness = SweeperHarness(valkey_client, database, temporal, settings)
    await harness.prepare(MasterKeyRing(X25519PrivateKey.generate()))
    yield harness
    await harness.end()
    await database.close()


def verifying(harness: SweeperHarness) -> OrderActivities:
    asking = AccountQueryClient(
        harness.client, harness.database, WorkerStarter(harness.temporal, harness.settings), SECRETS
    )
    return OrderActivities(harness.client, harness.database, asking, SECRETS)


async def check(
    harness: SweeperHarness, order_id: uuid.UUID, by: OrderActivities | None = None
) -> Verified:
    request = VerifyOrder(order_id=str(order_id), user_id=harness.user_id, check=0, timeout=20.0)
    return await ActivityEnvironment().run((by or verifying(harness)).verify_order, request)


async def listed(
    harness: SweeperHarness,
    order_id: uuid.UUID,
    state: OrderState,
    *lots: int,
    side: Side = Side.BUY,
) -> BrokerOrder:
    fills = [
        Fill(fill_id=f"f{at}", quantity=many, price=Decimal(100 + at), at_ms=1_795_410_000_001)
        for at, many in enumerate(lots)
    ]
    return BrokerOrder(
        broker_order_id=f"B-{order_id.hex[:6]}",
        tag=(await harness.row(order_id)).tag,
        symbol="2330",
        side=side,
        quantity=2,
        price_type=PriceType.MARKET,
        price=None,
        time_in_force=TimeInForce.IOC,
        state=state,
        fills=fills,
    )


async def test_a_final_order_asks_nobody(harness: SweeperHarness) -> None:
    order_id = await harness.order(state="filled")
    async with ReportingWorker(harness.client, harness.user_id) as worker:
        seen = await check(harness, order_id)
    assert (seen.finding, seen.state, worker.asked) == (VerificationFinding.FINAL, "filled", [])


async def test_an_order_that_nobody_knows_ends_its_workflow(harness: SweeperHarness) -> None:
    assert (await check(harness, uuid.uuid4())).finding == VerificationFinding.GONE


async def test_an_answer_that_was_not_recorded_comes_before_the_broker(
    harness: SweeperHarness,
) -> None:
    order_id = await harness.order(state="submitting")
    outcome = OrderOutcome(order_id=str(order_id), state=OrderState.FILLED, filled_quantity=2)
    answer = worker_answer(harness.user_id, Answer(request_id=str(order_id), outcome=outcome))
    await harness.client.set(keys.response(harness.user_id, str(order_id)), answer)
    assert (await check(harness, order_id)).finding == VerificationFinding.FINAL
    assert (await harness.row(order_id)).filled_quantity == 2


async def test_an_unknown_order_is_found_by_its_tag_with_its_fills(harness: SweeperHarness) -> None:
    order_id = await harness.order(state="unknown")
    listed_order = await listed(harness, order_id, OrderState.FILLED, 1, 1)
    async with ReportingWorker(harness.client, harness.user_id, listed_order):
        seen = await check(harness, order_id)
    assert (seen.finding, seen.state) == (VerificationFinding.FINAL, "filled")
    row = await harness.row(order_id)
    assert (row.broker_order_id, row.filled_quantity) == (listed_order.broker_order_id, 2)
    assert (row.average_price, row.verify_at) == (Decimal("100.5"), None)


async def test_an_order_for_a_rolling_code_is_found_under_the_contract_that_it_stands_for(
    harness: SweeperHarness,
) -> None:
    order_id = await harness.order(state="unknown", symbol="TXFR1")
    listed_order = structs.replace(
        await listed(harness, order_id, OrderState.FILLED, 2), symbol="TXFL6"
    )
    async with ReportingWorker(harness.client, harness.user_id, listed_order):
        seen = await check(harness, order_id)
    assert (seen.finding, seen.state) == (VerificationFinding.FINAL, "filled")


async def test_an_order_with_our_tag_that_cannot_be_ours_makes_an_absence_uncertain(
    harness: SweeperHarness,
) -> None:
    order_id = await harness.order(seconds_left=-30.0, state="unknown")
    sold = await listed(harness, order_id, OrderState.FILLED, 2, side=Side.SELL)
    async with ReportingWorker(harness.client, harness.user_id, sold):
        seen = await check(harness, order_id)
    assert (seen.finding, seen.complete, seen.certain) == (VerificationFinding.MISSING, True, False)


async def test_an_order_that_works_at_the_broker_is_followed_on(harness: SweeperHarness) -> None:
    order_id = await harness.order(state="unknown")
    listed_order = await listed(harness, order_id, OrderState.PART_FILLED, 1)
    async with ReportingWorker(harness.client, harness.user_id, listed_order):
        for _ in range(2):
            seen = await check(harness, order_id)
    assert (seen.finding, seen.state) == (VerificationFinding.LISTED, "part_filled")
    assert (await harness.row(order_id)).filled_quantity == 1


async def test_the_same_tag_on_another_days_or_sides_order_is_not_ours(
    harness: SweeperHarness,
) -> None:
    order_id, earlier = await harness.order(state="unknown"), await harness.order(state="filled")
    sold = await listed(harness, order_id, OrderState.FILLED, 2, side=Side.SELL)
    taken = await listed(harness, order_id, OrderState.FILLED, 2)
    async with harness.database.session() as session:
        row = await recording.get_order(session, earlier)
        row.tag, row.trading_day = taken.tag, datetime(2026, 1, 5, tzinfo=UTC).date()
        row.broker_order_id = taken.broker_order_id
    async with ReportingWorker(harness.client, harness.user_id, sold, taken):
        seen = await check(harness, order_id)
    assert seen.finding == VerificationFinding.MISSING


async def serve(harness: SweeperHarness, *, ended: bool) -> int:
    """The row of a worker; returns its epoch."""
    claim = uuid.uuid4().hex
    async with harness.database.session() as session:
        assigned = await worker_sessions.assign_epoch(
            session, claim_id=claim, user_id=harness.user_id, pool="default"
        )
        await assign_launched_worker(session, claim, claim)
        if ended:
            await worker_sessions.end_session(session, claim_id=claim, reason="died")
    return assigned.epoch


@pytest.mark.parametrize("died", [True, False])
async def test_a_missing_order_comes_with_what_its_absence_is_worth(
    harness: SweeperHarness, died: bool
) -> None:
    order_id = await harness.order(seconds_left=-30.0, state="unknown")
    epoch = await serve(harness, ended=died)
    present = await serve(harness, ended=False) if died else epoch
    told = OrderEvent(
        event_id=f"{order_id}:e",
        order_id=str(order_id),
        user_id=harness.user_id,
        epoch=epoch,
        state=OrderState.SUBMITTING,
        at_ms=int(time.time() * 1000),
    )
    async with harness.database.session() as session:
        await recording.record_event(session, told)
    worker = ReportingWorker(harness.client, harness.user_id)
    worker.epoch = present
    async with worker:
        seen = await check(harness, order_id)
        worker.certain = False
        unsure = await check(harness, order_id)
        worker.complete = False
        partial = await check(harness, order_id)
    assert (seen.finding, seen.complete, seen.certain, seen.dead) == (
        VerificationFinding.MISSING,
        True,
        True,
        died,
    )
    assert abs(seen.quiet_since - time.time()) < 20
    assert (unsure.complete, unsure.certain) == (True, False)
    assert (partial.complete, partial.certain) == (False, False)


async def test_the_reason_why_a_broker_could_not_be_asked_is_reported(
    harness: SweeperHarness,
) -> None:
    order_id = await harness.order(state="unknown")
    async with ReportingWorker(harness.client, harness.user_id) as worker:
        worker.failure = SessionDown("it is being rebuilt")
        seen = await check(harness, order_id)
    assert (seen.finding, seen.code, seen.detail) == (
        VerificationFinding.UNASKED,
        "SESSION_DOWN",
        "it is being rebuilt",
    )


async def test_without_a_worker_one_is_asked_for_first(harness: SweeperHarness) -> None:
    seen = await check(harness, await harness.order(state="unknown"))
    assert (seen.finding, seen.code) == (VerificationFinding.UNASKED, "WORKER_UNAVAILABLE")
    assert "no worker within" in seen.detail


async def test_checks_of_one_account_share_a_question(harness: SweeperHarness) -> None:
    by = verifying(harness)
    ids = [await harness.order(state="unknown") for _ in range(5)]
    async with ReportingWorker(harness.client, harness.user_id) as worker:
        seen = await asyncio.gather(*(check(harness, order_id, by) for order_id in ids))
    assert {result.finding for result in seen} == {VerificationFinding.MISSING}
    assert len(worker.asked) < 5


@pytest.mark.parametrize(
    ("state", "settled"),
    [("unknown", True), ("accepted", True), ("submitted", False), ("filled", False)],
)
async def test_only_an_order_that_the_broker_never_confirmed_is_settled_as_absent(
    harness: SweeperHarness, state: str, settled: bool
) -> None:
    order_id = await harness.order(state=state)
    request = UnresolvedOrder(order_id=str(order_id), reason="never reached the broker: …")
    assert await ActivityEnvironment().run(verifying(harness).settle_absent, request) == settled
    row = await harness.row(order_id)
    assert row.state == ("rejected" if settled else state)
    if settled:
        assert (row.reason_code, row.verify_at) == ("WORKER_LOST", None)
        assert "never reached the broker" in (row.reason or "")


async def test_a_dead_end_is_put_on_the_list_for_a_person(harness: SweeperHarness) -> None:
    order_id = await harness.order(state="unknown")
    request = UnresolvedOrder(order_id=str(order_id), reason="nobody knows")
    assert await ActivityEnvironment().run(verifying(harness).demand_attention, request)
    assert (await harness.row(order_id)).attention == "nobody knows"


async def test_a_question_whose_ring_a_frozen_worker_took_is_rung_for_again(
    harness: SweeperHarness,
) -> None:
    await harness.client.set(keys.mark(harness.user_id), "1:w")
    asking = AccountQueryClient(
        harness.client, harness.database, WorkerStarter(harness.temporal, harness.settings), SECRETS
    )
    question = asyncio.create_task(asking.orders(harness.user_id, "main", 3.0))
    rings = [
        await reply_of(harness.client.blpop([keys.doorbell(harness.user_id)], timeout=3))
        for _ in range(2)
    ]
    assert all(rings), "one ring, and nobody took the question"
    with pytest.raises(WorkerUnavailable):
        await question
