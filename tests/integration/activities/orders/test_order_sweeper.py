"""Orders whose followers died: the sweeper takes them on, whatever happened before."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from redis.asyncio import Redis
from sqlalchemy import func, select, update
from temporalio.client import Client

from infra.database.engine import Database
from infra.database.models import Order
from infra.database.orders import attention
from infra.database.orders.acceptance import OrderBounds, place_request
from infra.database.orders.states import OPEN_STATES
from infra.local.servers import TemporalServer, ValkeyServer
from infra.settings import Settings
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.valkey.request_queue import RequestQueue
from infra.vault.key_pairs import MasterKeyRing
from tests.support.message_signing import SECRETS, worker_answer
from tests.support.orders.sweeper import SweeperHarness
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import (
    Answer,
    Failure,
    OrderOutcome,
    OrderState,
    PlaceOrder,
    decode,
)
from worker_runtime.protocol.requests import parse_frame
from workflows.names import user_worker_id


@pytest.fixture
async def harness(
    valkey_client: Redis, migrated_database: str, temporal_server: TemporalServer
) -> AsyncIterator[SweeperHarness]:
    database = Database(migrated_database)
    temporal = await Client.connect(temporal_server.address)
    settings = Settings(
        database_url=migrated_database,
        claim_timeout=0.5,
        launch_timeout=0.1,
        connect_timeout=0.5,
        sweep_period=0.05,
    )
    harness = SweeperHarness(valkey_client, database, temporal, settings)
    await harness.prepare(MasterKeyRing(X25519PrivateKey.generate()))
    await harness.mark()
    yield harness
    await harness.end()
    await database.close()


async def test_an_order_that_was_never_queued_is_queued_once_by_two_sweepers(
    harness: SweeperHarness,
) -> None:
    order_id, began = await harness.order(), datetime.now(UTC)
    await asyncio.gather(harness.sweeper().sweep_once(), harness.sweeper().sweep_once())
    await harness.order(due=False)  # not due: left alone
    [item] = await harness.queued()
    request: PlaceOrder = decode(parse_frame(item).payload, PlaceOrder)
    assert (request.order_id, request.reply_to) == (str(order_id), "")
    row = await harness.row(order_id)
    assert row.state == "accepted"
    assert row.verify_at is not None
    assert row.verify_at > began + timedelta(seconds=1)  # it was due a second before


async def test_an_order_that_was_never_queued_keeps_the_bounds_of_its_price(
    harness: SweeperHarness,
) -> None:
    bounds = OrderBounds(0.0, Decimal("0.1"), Decimal("12.5"))
    await harness.order(bounds=bounds)
    await harness.sweeper().sweep_once()
    [item] = await harness.queued()
    request: PlaceOrder = decode(parse_frame(item).payload, PlaceOrder)
    assert (request.price_band, request.most_price) == bounds[1:]


async def test_an_order_that_waits_for_valkey_keeps_its_deadline(harness: SweeperHarness) -> None:
    """A later one would hide from the worker that the order is older than a promoted server: it was
    executed a second time."""
    order_id = await harness.order()
    await harness.client.execute_command("CLIENT", "PAUSE", 1500, "ALL")  # type: ignore[no-untyped-call]
    await harness.sweeper().sweep_once()
    [item] = await harness.queued()
    row = await harness.row(order_id)
    assert row.deadline_at is not None
    late_ms = parse_frame(item).deadline_ms - row.deadline_at.timestamp() * 1000
    assert -2000 < late_ms < 200  # the clocks of PostgreSQL and Valkey are this machine's


async def test_an_order_that_was_queued_is_not_queued_again(harness: SweeperHarness) -> None:
    order_id = await harness.order()
    request = place_request(await harness.row(order_id), "channel")
    await RequestQueue(harness.client, SECRETS).enqueue(request, time.monotonic() + 30.0)
    await reply_of(harness.client.rpop(keys.requests(harness.user_id)))
    await harness.sweeper().sweep_once()
    assert await harness.queued() == []


@pytest.mark.parametrize("queued", [True, False])
async def test_an_overdue_order_that_no_worker_took_has_expired_and_stays_so(
    harness: SweeperHarness, queued: bool
) -> None:
    order_id = await harness.order(seconds_left=-5.0)
    request = place_request(await harness.row(order_id), "channel")
    if queued:
        await RequestQueue(harness.client, SECRETS).enqueue(request, time.monotonic() + 30.0)
    await harness.sweeper().sweep_once()
    row = await harness.row(order_id)
    assert (row.state, row.reason_code, row.verify_at) == (
        "expired",
        "DEADLINE_EXCEEDED",
        None,
    )
    answer = await RequestQueue(harness.client, SECRETS).answer(
        harness.user_id, str(order_id), str(order_id), 0
    )
    assert answer is not None
    assert answer.outcome is not None
    assert answer.outcome.state is OrderState.EXPIRED
    # The API's own, held up until now.
    await RequestQueue(harness.client, SECRETS).enqueue(request, time.monotonic() + 30.0)
    assert await harness.queued() == []


@pytest.mark.parametrize("queued", [True, False])
async def test_an_overdue_order_of_a_queue_that_may_be_an_older_copy_is_unknown_and_never_executed(
    harness: SweeperHarness, queued: bool
) -> None:
    order_id = await harness.order(seconds_left=-5.0)
    request = place_request(await harness.row(order_id), "channel")
    if queued:
        await RequestQueue(harness.client, SECRETS).enqueue(request, time.monotonic() + 30.0)
    note: dict[Any, Any] = {
        "server": await valkey.read_server_id(harness.client),
        "at_ms": (await harness.client.time())[0] * 1000,
    }
    await reply_of(harness.client.hset(keys.SERVER_SINCE, mapping=note))
    await harness.sweeper().sweep_once()
    assert (await harness.row(order_id)).state == "unknown"
    assert await harness.followed(order_id)
    await RequestQueue(harness.client, SECRETS).enqueue(request, time.monotonic() + 30.0)
    assert await harness.queued() == []


async def test_an_overdue_order_is_left_to_its_api_for_a_moment(harness: SweeperHarness) -> None:
    order_id = await harness.order(seconds_left=-5.0)
    assert await harness.sweeper(grace=60.0).sweep_once() == 1
    assert (await harness.row(order_id)).state == "accepted"


async def test_an_answer_that_nobody_read_is_written(harness: SweeperHarness) -> None:
    order_id = await harness.order(seconds_left=-5.0)
    outcome = OrderOutcome(order_id=str(order_id), state=OrderState.FILLED, filled_quantity=2)
    answer = worker_answer(harness.user_id, Answer(request_id=str(order_id), outcome=outcome))
    await harness.client.set(keys.response(harness.user_id, str(order_id)), answer)
    await harness.sweeper().sweep_once()
    row = await harness.row(order_id)
    assert (row.state, row.filled_quantity, row.verify_at) == ("filled", 2, None)


async def test_an_order_that_a_worker_could_not_read_is_rejected(harness: SweeperHarness) -> None:
    order_id = await harness.order(seconds_left=-5.0)
    failure = Failure(code="MALFORMED_MESSAGE", detail="not JSON")
    answer = worker_answer(harness.user_id, Answer(request_id=str(order_id), failure=failure))
    await harness.client.set(keys.response(harness.user_id, str(order_id)), answer)
    await harness.sweeper().sweep_once()
    row = await harness.row(order_id)
    assert (row.state, row.reason_code) == ("rejected", "MALFORMED_MESSAGE")


async def test_an_overdue_order_that_a_worker_was_about_to_submit_is_unknown_and_followed(
    harness: SweeperHarness,
) -> None:
    order_id = await harness.order(seconds_left=-5.0)
    await harness.client.set(keys.journal(harness.user_id, str(order_id)), "1")
    await harness.sweeper().sweep_once()
    assert (await harness.row(order_id)).state == "unknown"
    assert await harness.followed(order_id)


@pytest.mark.parametrize("seconds_left", [20.0, -5.0])
async def test_an_order_of_another_generation_is_unknown_and_never_queued_again(
    harness: SweeperHarness, seconds_left: float
) -> None:
    order_id = await harness.order(seconds_left=seconds_left, generation="before the flush")
    await harness.sweeper().sweep_once()
    assert (await harness.row(order_id)).state == "unknown"
    assert await harness.followed(order_id)
    assert await harness.queued() == []


async def test_an_order_in_a_dead_workers_hand_is_followed(harness: SweeperHarness) -> None:
    order_id = await harness.order(seconds_left=-5.0)
    await RequestQueue(harness.client, SECRETS).enqueue(
        place_request(await harness.row(order_id), ""), time.monotonic() + 30.0
    )
    user = harness.user_id
    await reply_of(
        harness.client.lmove(keys.requests(user), keys.processing(user), "RIGHT", "LEFT")
    )
    await harness.sweeper().sweep_once()
    assert (await harness.row(order_id)).state == "accepted"
    assert await harness.followed(order_id)


@pytest.mark.parametrize("state", ["submitting", "unknown", "submitted", "part_filled"])
async def test_an_order_that_went_on_its_way_is_followed_and_looked_at_again_later(
    harness: SweeperHarness, state: str
) -> None:
    order_id = await harness.order(state=state)
    await harness.sweeper().sweep_once()
    assert await harness.followed(order_id)
    row = await harness.row(order_id)
    assert row.verify_at is not None
    assert row.verify_at > datetime.now(UTC) + timedelta(seconds=60)
    # A person wants to know: at once, though the workflow runs.
    async with harness.database.session() as session:
        await attention.recheck_order(session, order_id, actor="key:7")
    assert await harness.sweeper().sweep_once() == 1
    assert await harness.rechecks(order_id) == 1
    await set_due(harness, order_id)  # nobody asked: its time has come
    assert await harness.sweeper().sweep_once() == 1
    assert await harness.rechecks(order_id) == 1


async def set_due(harness: SweeperHarness, order_id: uuid.UUID) -> None:
    async with harness.database.session() as session:
        due = update(Order).where(Order.id == order_id).values(verify_at=datetime.now(UTC))
        await session.execute(due)


async def test_while_valkey_is_away_nothing_is_concluded(harness: SweeperHarness) -> None:
    order_id = await harness.order(seconds_left=-5.0)
    without_valkey = SweeperHarness(
        Redis(port=1), harness.database, harness.temporal, harness.settings
    )
    await without_valkey.sweeper(lease=0.1).sweep_once()
    assert (await harness.row(order_id)).state == "accepted"
    while await harness.sweeper().sweep_once() == 0:  # noqa: ASYNC110 - until the lease has ended
        await asyncio.sleep(0.02)
    assert (await harness.row(order_id)).state == "expired"


@pytest.mark.timeout(120)
async def test_nothing_falls_between_two_sweepers_one_of_which_is_killed(
    harness: SweeperHarness, valkey_server: ValkeyServer, temporal_server: TemporalServer
) -> None:
    ids = {
        await harness.order(seconds_left=600.0) for _ in range(150)
    }  # more than a slow machine needs
    program = [sys.executable, "-m", "tests.support.orders.sweeper"]
    servers = [harness.settings.database_url, valkey_server.url, temporal_server.address, "1.0"]
    sweepers = [
        await asyncio.create_subprocess_exec(*program, *servers, stdout=DEVNULL) for _ in range(2)
    ]
    try:
        while not await harness.queued():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        sweepers[0].kill()
        while len(await harness.queued()) < len(ids):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        # All of them once more, after the kill: what was queued before is known.
        later = datetime.now(UTC) + timedelta(seconds=1)
        while not all(  # noqa: ASYNC110
            due and due > later
            for due in [(await harness.row(order_id)).verify_at for order_id in ids]
        ):
            await asyncio.sleep(0.1)
    finally:
        for sweeper in sweepers:
            with suppress(ProcessLookupError):
                sweeper.kill()
            await sweeper.wait()
    queued = [uuid.UUID(parse_frame(item).request_id) for item in await harness.queued()]
    assert sorted(queued) == sorted(ids)
    async with harness.database.session() as session:
        abandoned = select(func.count()).where(
            Order.state.in_(OPEN_STATES), Order.verify_at.is_(None), Order.attention.is_(None)
        )
        assert await session.scalar(abandoned) == 0  # the sweeper or a person checks every open one


async def test_an_order_that_a_worker_left_in_its_queue_when_it_ended_has_another_one_started(
    harness: SweeperHarness,
) -> None:
    """A drain that opens no new run, or an end over failing logins: nobody but the sweeper
    looks."""
    order_id = await harness.order()
    request = place_request(await harness.row(order_id), "channel")
    await RequestQueue(harness.client, SECRETS).enqueue(request, time.monotonic() + 30.0)
    await harness.client.delete(keys.mark(harness.user_id))
    await harness.sweeper().sweep_once()
    while not await harness.running(user_worker_id(harness.user_id)):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    # For the next worker, or for the sweeper once it is overdue.
    assert len(await harness.queued()) == 1
    assert (await harness.row(order_id)).state == "accepted"
