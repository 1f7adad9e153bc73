"""What a session receives of the user's orders: with its claim, and when it was replaced."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from infra.database.orders import acceptance, recording
from infra.database.orders.acceptance import NewOrder
from infra.valkey.client import reply_of
from tests.support.activities.harness import ActivityHarness
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import (
    Claim,
    OrderOutcome,
    OrderState,
    ReloadCredentials,
    Signed,
    decode,
)
from workflows.user_worker.messages import ReloadRequest


async def accept(harness: ActivityHarness, user: str, number: int, state: OrderState) -> str:
    new = NewOrder(
        user_id=user,
        account_id="main",
        client_order_id=f"c{number}",
        fingerprint="f",
        symbol=f"S{number}",
        side="buy",
        quantity=1,
        price_type="MKT",
        price=None,
        time_in_force="IOC",
        generation="g",
        lifetime_s=30.0,
        trading_day=datetime.now(UTC).date() + timedelta(days=1),
    )
    async with harness.database.session() as session:
        order_id = str((await acceptance.accept_order(session, new)).order.id)
        await recording.apply_outcome(session, OrderOutcome(order_id=order_id, state=state))
    return order_id


async def test_orders_that_are_not_final_go_with_the_claim_and_with_a_reload(
    harness: ActivityHarness,
) -> None:
    user, worker = await harness.user(), await harness.worker()
    unknown = await accept(harness, user, 1, OrderState.UNKNOWN)
    await accept(harness, user, 2, OrderState.FILLED)
    result, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), worker.serve()
    )
    assert result.worker is not None
    [claim] = worker.received
    assert isinstance(claim, Claim)
    assert [order.order_id for order in claim.open_orders] == [unknown]
    request = ReloadRequest(
        user_id=user, worker=result.worker, reload_id="r1", timeout=0.1, cause="signal"
    )
    await harness.run(harness.reloading.reload_credentials, request)
    signed: Signed = decode(await reply_of(harness.client.lpop(keys.control(user))), Signed)
    reload: ReloadCredentials = decode(signed.payload, ReloadCredentials)
    assert reload.open_orders == claim.open_orders
