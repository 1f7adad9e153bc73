"""A call to a worker: what it returns, what each of its errors says, and what it leaves behind."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from redis.asyncio import Redis
from temporalio.client import Client
from temporalio.service import RPCError

from infra.local.servers import TemporalServer
from infra.settings import Settings
from infra.temporal.starter import WorkerStarter
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.valkey.request_queue import RequestQueue
from infra.worker_calls.answers import AnswerReader
from infra.worker_calls.client import ANSWER_GRACE_S, NoAnswer, RequestWithdrawn, WorkerClient
from tests.support.message_signing import SECRETS, worker_answer
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BrokerError, DeadlineExceeded, WorkerUnavailable
from worker_runtime.protocol.messages import Answer, Failure, OrderState, PlaceOrder, decode
from worker_runtime.protocol.order_terms import PriceType, Side, TimeInForce
from worker_runtime.protocol.requests import (
    CancelOrder,
    QueryAccount,
    Request,
    parse_frame,
)
from workflows.names import user_worker_id

#: Seconds until the starter gives up, because no orchestrator runs here.
START_TIMEOUT_S = 0.6


class CalledUser:
    """A user whose queue the test serves by hand."""

    def __init__(self, client: Redis, workers: WorkerClient) -> None:
        self.user_id = f"u{uuid.uuid4().hex[:8]}"
        self.client = client
        self.workers = workers

    async def show_mark(self) -> None:
        await self.client.set(keys.mark(self.user_id), "1:w")

    def query(self) -> QueryAccount:
        return QueryAccount(
            request_id=f"query:{uuid.uuid4()}",
            user_id=self.user_id,
            account_id="main",
            reply_to="",
            generation="g",
        )

    def order(self) -> PlaceOrder:
        order_id = str(uuid.uuid4())
        return PlaceOrder(
            request_id=order_id,
            order_id=order_id,
            user_id=self.user_id,
            account_id="main",
            symbol="2330",
            side=Side.BUY,
            quantity=1,
            price_type=PriceType.MARKET,
            price=None,
            time_in_force=TimeInForce.IOC,
            tag="t",
            reply_to="",
            generation="g",
        )

    def cancel(self) -> CancelOrder:
        return CancelOrder(
            request_id="cancel:1",
            order_id=str(uuid.uuid4()),
            user_id=self.user_id,
            account_id="main",
            symbol="2330",
            tag="t",
            broker_order_id=None,
            reply_to="",
            generation="g",
        )

    def call(self, request: Request, seconds: float = 10.0) -> asyncio.Task[Answer]:
        deadline = time.monotonic() + seconds
        return asyncio.create_task(self.workers.call(request, deadline, first_epoch=1))

    async def take(self) -> Request:
        """Takes the next request out of the queue, as `pop.lua` does for a worker."""
        queue, processing = keys.requests(self.user_id), keys.processing(self.user_id)
        item = await reply_of(self.client.blmove(queue, processing, 10))
        assert item is not None, "nothing was queued"
        request: Request = decode(parse_frame(item).payload, Request)
        return request

    async def answer(self, answer: Answer) -> None:
        key = keys.response(self.user_id, answer.request_id)
        await self.client.set(key, worker_answer(self.user_id, answer), ex=60)

    async def queued(self) -> int:
        return int(await reply_of(self.client.llen(keys.requests(self.user_id))))


@pytest.fixture
async def user(valkey_client: Redis, temporal_server: TemporalServer) -> AsyncIterator[CalledUser]:
    await valkey.ensure_generation(valkey_client, "g")
    temporal = await Client.connect(temporal_server.address)
    each = START_TIMEOUT_S / 3
    settings = Settings(claim_timeout=each, launch_timeout=each, connect_timeout=each)
    starter = WorkerStarter(temporal, settings)
    queue = RequestQueue(valkey_client, SECRETS)
    workers = WorkerClient(queue, AnswerReader(valkey_client, SECRETS), starter)
    user = CalledUser(valkey_client, workers)
    yield user
    await starter.close()
    with suppress(RPCError):  # it is there only if a worker was asked for
        handle = temporal.get_workflow_handle(user_worker_id(user.user_id))
        await handle.terminate("the test is over")


async def test_a_call_returns_the_answer_of_the_worker(user: CalledUser) -> None:
    await user.show_mark()
    call = user.call(user.query())
    taken = await user.take()
    await user.answer(Answer(request_id=taken.request_id, report={"account_id": "main"}))
    assert (await call).report == {"account_id": "main"}
    assert user.workers.answers.pending == 0


async def test_a_failure_that_the_worker_answers_is_returned_and_not_raised(
    user: CalledUser,
) -> None:
    await user.show_mark()
    call = user.call(user.query())
    taken = await user.take()
    failure = Failure.of(BrokerError("it is closed"))
    await user.answer(Answer(request_id=taken.request_id, failure=failure))
    assert (await call).failure == failure


async def test_a_query_that_no_worker_takes_is_withdrawn_after_its_deadline(
    user: CalledUser,
) -> None:
    await user.show_mark()
    query, began = user.query(), time.monotonic()
    with pytest.raises(RequestWithdrawn) as withdrawn:
        await user.call(query, 0.2)
    assert time.monotonic() - began >= 0.2 + ANSWER_GRACE_S
    assert isinstance(withdrawn.value.reason, NoAnswer)
    assert await user.queued() == 0


async def test_an_order_that_no_worker_takes_expires(user: CalledUser) -> None:
    await user.show_mark()
    with pytest.raises(RequestWithdrawn) as withdrawn:
        await user.call(user.order(), 0.1)
    assert isinstance(withdrawn.value.reason, DeadlineExceeded)
    outcome = withdrawn.value.answer.outcome
    assert outcome is not None
    assert (outcome.state, outcome.withdrawn) == (OrderState.EXPIRED, True)


async def test_a_request_for_which_no_worker_can_be_started_is_withdrawn_with_the_reason(
    user: CalledUser,
) -> None:
    with pytest.raises(RequestWithdrawn) as withdrawn:
        await user.call(user.order())
    assert isinstance(withdrawn.value.reason, WorkerUnavailable)
    outcome = withdrawn.value.answer.outcome
    assert outcome is not None
    assert outcome.state is OrderState.REJECTED
    assert await user.queued() == 0


async def test_a_repeat_of_a_withdrawn_request_returns_the_withdrawal(user: CalledUser) -> None:
    await user.show_mark()
    query = user.query()
    with pytest.raises(RequestWithdrawn) as withdrawn:
        await user.call(query, 0.1)
    assert await user.call(query, 5.0) == withdrawn.value.answer
    assert await user.queued() == 0


async def test_a_request_that_a_worker_took_and_did_not_answer_has_an_unknown_outcome(
    user: CalledUser,
) -> None:
    await user.show_mark()
    call = user.call(user.query(), 0.3)
    await user.take()
    with pytest.raises(NoAnswer):
        await call


async def test_an_answer_is_awaited_if_no_worker_starts_but_one_has_the_request(
    user: CalledUser,
) -> None:
    call = user.call(user.cancel())
    taken = await user.take()  # by a worker whose mark was lost
    await asyncio.wait({call}, timeout=START_TIMEOUT_S + 0.5)
    assert not call.done()
    await user.answer(Answer(request_id=taken.request_id))
    assert (await call).failure is None


async def test_a_repeat_of_a_cancel_that_failed_is_sent_under_a_new_id(user: CalledUser) -> None:
    await user.show_mark()
    cancel = user.cancel()
    first = user.call(cancel)
    taken = await user.take()
    failure = Failure.of(BrokerError("it is closed"))
    await user.answer(Answer(request_id=taken.request_id, failure=failure))
    assert (await first).failure == failure
    second = user.call(cancel)
    taken = await user.take()
    assert taken.request_id == "cancel:1#2"
    await user.answer(Answer(request_id=taken.request_id))
    assert (await second).request_id == "cancel:1#2"


async def test_repeats_in_one_process_share_the_request_and_its_answer(user: CalledUser) -> None:
    await user.show_mark()
    query = user.query()
    calls = [user.call(query) for _ in range(3)]
    taken = await user.take()
    await user.answer(Answer(request_id=taken.request_id, report={}))
    assert await asyncio.gather(*calls) == [Answer(request_id=query.request_id, report={})] * 3
    assert await user.queued() == 0


async def test_a_request_that_is_queued_too_late_has_the_deadline_that_it_was_given(
    user: CalledUser,
) -> None:
    """Deadline less lifetime is when an order was accepted: workers compare it with the server's
    age."""
    await user.show_mark()
    late_ms = 60_000
    before_ms = await valkey.read_clock(user.client)
    queued = await user.workers.queue.enqueue(user.order(), time.monotonic() - late_ms / 1000)
    after_ms = await valkey.read_clock(user.client)
    assert before_ms - late_ms - 1 <= queued.frame.deadline_ms <= after_ms - late_ms
