"""Who can only write to Valkey tells the API nothing of an order, and no worker speaks of
another's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY
from redis.asyncio import Redis
from structlog.testing import capture_logs

from infra.database.workers import sessions as worker_sessions
from infra.vault.message_secret import MessageSecrets
from infra.vault.secret_versions import new_version
from tests.support.message_signing import worker_answer
from tests.support.systems.api import ServedApi, StartWorker, an_order
from tests.support.waiting import until
from tests.support.workers.api_worker import filled, silent
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import Answer, OrderOutcome, OrderState, PlaceOrder, encode

STRANGERS = MessageSecrets([new_version(1)])
Forge = Callable[[PlaceOrder], bytes]


def unsigned(order: PlaceOrder) -> bytes:
    return encode(filled(order))


def without_mac(order: PlaceOrder) -> bytes:
    return b"worker:1:scripted||" + encode(filled(order))


def by_a_stranger(order: PlaceOrder) -> bytes:
    return worker_answer(order.user_id, filled(order), secrets=STRANGERS)


def by_another_users_worker(order: PlaceOrder) -> bytes:
    return worker_answer("another", filled(order))


def of_another_epoch(order: PlaceOrder) -> bytes:
    return worker_answer(order.user_id, filled(order)).replace(b"worker:1:", b"worker:2:", 1)


def by_a_worker_as_a_service(order: PlaceOrder) -> bytes:
    return worker_answer(order.user_id, filled(order)).replace(b"worker:1:w", b"service", 1)


def altered(order: PlaceOrder) -> bytes:
    return worker_answer(order.user_id, filled(order)).replace(
        b'"filled_quantity":1', b'"filled_quantity":9'
    )


def about_another_order(order: PlaceOrder) -> bytes:
    """By the user's own worker: an answer to this request that names another order."""
    other = filled(replace(order, order_id="11111111-1111-4111-8111-111111111111"))
    return worker_answer(order.user_id, other)


def withdrawn_by_a_worker(order: PlaceOrder) -> bytes:
    outcome = OrderOutcome(order_id=order.order_id, state=OrderState.CANCELLED, withdrawn=True)
    return worker_answer(order.user_id, Answer(request_id=order.request_id, outcome=outcome))


FORGERIES = [
    unsigned,
    without_mac,
    by_a_stranger,
    by_another_users_worker,
    of_another_epoch,
    by_a_worker_as_a_service,
    altered,
    about_another_order,
    withdrawn_by_a_worker,
]


@pytest.mark.parametrize("forge", FORGERIES)
async def test_a_forged_answer_is_as_if_it_were_not_there(
    api: ServedApi,
    user: httpx.AsyncClient,
    start_worker: StartWorker,
    valkey_client: Redis,
    forge: Forge,
) -> None:
    refused = ("berth_messages_refused_total", {"kind": "answer"})
    before = REGISTRY.get_sample_value(*refused) or 0
    worker = await start_worker(api.user, silent)
    waiting = asyncio.create_task(user.post(f"/users/{api.user}/orders?wait=30", json=an_order()))
    await worker.taken.wait()
    (order,) = worker.popped
    await valkey_client.set(keys.response(api.user, order.request_id), forge(order), ex=60)
    assert await valkey_client.publish(order.reply_to, forge(order)) == 1
    read = await user.get(f"/orders/{order.order_id}")  # reads the response key
    assert read.json()["state"] in ("accepted", "queued")
    assert not waiting.done()
    await worker.answer_later(filled(order))
    assert (await waiting).json()["state"] == "filled"
    await until(lambda: api.services.answers.pending == 0)
    assert (REGISTRY.get_sample_value(*refused) or 0) - before == 2


async def test_many_forged_answers_are_counted_and_logged_once(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, valkey_client: Redis
) -> None:
    refused = ("berth_messages_refused_total", {"kind": "answer"})
    before = REGISTRY.get_sample_value(*refused) or 0
    worker = await start_worker(api.user, silent)
    waiting = asyncio.create_task(user.post(f"/users/{api.user}/orders?wait=30", json=an_order()))
    await worker.taken.wait()
    (order,) = worker.popped
    with capture_logs() as logs:
        for _ in range(20):
            assert await valkey_client.publish(order.reply_to, by_a_stranger(order)) == 1
        await until(lambda: (REGISTRY.get_sample_value(*refused) or 0) - before == 20)
        await worker.answer_later(filled(order))
        assert (await waiting).json()["state"] == "filled"
    logged = [
        (line["user_id"], line["reason"]) for line in logs if line["event"] == "answer_refused"
    ]
    assert logged == [(api.user, "not its author's")]


@pytest.mark.parametrize("successor", [True, False])
async def test_a_former_workers_answer_is_as_if_it_were_not_there(
    api: ServedApi,
    user: httpx.AsyncClient,
    start_worker: StartWorker,
    valkey_client: Redis,
    successor: bool,
) -> None:
    async def assign(claim_id: str) -> None:
        async with api.services.database.session() as session:
            await worker_sessions.assign_epoch(
                session, user_id=api.user, claim_id=claim_id, pool="p"
            )

    async def say(request_id: str, answer: bytes) -> None:
        await valkey_client.set(keys.response(api.user, request_id), answer, ex=60)
        assert (
            await valkey_client.publish(api.services.answers.channels.name_of(api.user), answer)
            == 1
        )

    worker = await start_worker(api.user, silent)
    await assign(f"{api.user}-1")
    async with api.services.database.session() as session:
        await worker_sessions.end_session(session, claim_id=f"{api.user}-1", reason="idle")
    if successor:
        await assign(f"{api.user}-2")
    waiting = asyncio.create_task(user.post(f"/users/{api.user}/orders?wait=30", json=an_order()))
    await worker.taken.wait()
    (order,) = worker.popped
    await say(order.request_id, worker_answer(api.user, filled(order), epoch=1))
    assert (await user.get(f"/orders/{order.order_id}")).json()["state"] in ("accepted", "queued")
    assert not waiting.done()
    outcome = OrderOutcome(
        order_id=order.order_id, state=OrderState.SUBMITTED, broker_order_id="b1"
    )
    submitted = Answer(request_id=order.request_id, outcome=outcome)
    await say(order.request_id, worker_answer(api.user, submitted, epoch=2))
    assert (await waiting).json()["state"] == "submitted"
    # A cancel, too: the former one would hide a working order.
    cancelling = asyncio.create_task(
        user.post(f"/orders/{order.order_id}/cancel?wait=30", json={"request_id": "x"})
    )
    await until(lambda: bool(worker.asked))
    gone = OrderOutcome(order_id=order.order_id, state=OrderState.CANCELLED)
    cancelled = Answer(request_id=worker.asked[0].request_id, outcome=gone)
    await say(cancelled.request_id, worker_answer(api.user, cancelled, epoch=1))
    assert (await user.get(f"/orders/{order.order_id}")).json()["state"] == "submitted"
    assert not cancelling.done()
    await say(cancelled.request_id, worker_answer(api.user, cancelled, epoch=2))
    assert (await cancelling).json()["state"] == "cancelled"


async def test_a_flood_on_one_users_channel_holds_up_nobody_else(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, valkey_client: Redis
) -> None:
    """A worker knows the channel of its own user, on which it may publish what it likes."""
    listener = api.services.answers
    hostile = await start_worker(api.user, silent)
    waiting = asyncio.create_task(user.post(f"/users/{api.user}/orders?wait=30", json=an_order()))
    await hostile.taken.wait()
    (order,) = hostile.popped
    link, over = listener.link, asyncio.Event()

    async def flood() -> None:
        while not over.is_set():
            async with valkey_client.pipeline(transaction=False) as pipe:
                for number in range(500):
                    pipe.publish(order.reply_to, (b"x" * 400, by_a_stranger(order))[number % 2])
                await pipe.execute()

    flooding = asyncio.create_task(flood())
    try:
        await until(lambda: not listener.channels.is_open(order.reply_to.encode()))
        other = f"{api.user}-other"
        await start_worker(other)
        async with api.client(api.admin_key) as admin:
            await admin.post("/users", json={"user_id": other})
            credentials = {"broker": "paper", "api_key": "k", "secret_key": "s"}
            await admin.put(f"/users/{other}/accounts/main/credentials", json=credentials)
            answers = [
                await admin.post(f"/users/{other}/orders", json=an_order(n)) for n in range(20)
            ]
        assert {answer.json()["state"] for answer in answers} == {"filled"}
        # Its own user's answer is found by its key.
        await hostile.answer_later(filled(order))
        assert (await waiting).json()["state"] == "filled"
    finally:
        over.set()
        await flooding
    assert listener.link is link, "the connection was lost"
    assert await valkey_client.publish(order.reply_to, b"{}") == 0
