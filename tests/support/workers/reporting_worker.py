"""A worker that only answers questions about accounts, as the orchestrator sees it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra import tasks
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from tests.support.message_signing import switch_words, worker_answer
from worker_runtime.brokers.port import Listing
from worker_runtime.process.clock import wall_ms
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Answer, Failure, decode
from worker_runtime.protocol.requests import QueryAccount, Request, encode_report, parse_frame
from worker_runtime.trading.reconciliation import build_report


class ReportingWorker:
    """Serves `user_id` inside `async with`; lists `orders`, or answers with `failure`."""

    def __init__(self, client: Redis, user_id: str, *orders: BrokerOrder) -> None:
        self.user_id = user_id
        self.epoch = 1
        self.orders = list(orders)
        self.complete = True
        self.certain = True
        self.failure: BerthError | None = None
        #: Where what is listed comes from, if not from `orders`.
        self.broker: Callable[[], Listing] | None = None
        self.asked: list[QueryAccount] = []
        self._client = client
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        owner = keys.owner(self.user_id)
        generation = await valkey.ensure_generation(self._client, "g")
        owned = [str(self.epoch), "w", generation, *switch_words(self.user_id)]
        await valkey.run_script(
            self._client, scripts.SET_OWNER, [owner, keys.switch(self.user_id)], owned
        )
        await self._client.set(keys.mark(self.user_id), f"{self.epoch}:w")
        self._task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *reason: object) -> None:
        await tasks.cancel_tasks(self._task)

    async def _serve(self) -> None:
        for number in itertools.count():
            while not await self._pop(number):
                with suppress(RedisError):
                    await reply_of(self._client.blpop([keys.doorbell(self.user_id)], timeout=1))

    async def _pop(self, number: int) -> bool:
        user = self.user_id
        names = [keys.owner(user), keys.control(user), keys.requests(user), keys.processing(user)]
        names += [keys.pop(user), keys.switch(user)]
        kind, item, *_ = await valkey.run_script(
            self._client, scripts.POP, names, [str(self.epoch), "w", "w:1", str(number)]
        )
        if kind != b"request":
            return False
        query: Request = decode(parse_frame(item).payload, Request)
        assert isinstance(query, QueryAccount)
        self.asked.append(query)
        await valkey.run_script(
            self._client,
            scripts.ANSWER,
            keys.answering(user, query.request_id),
            [
                item,
                worker_answer(user, self._answer(query), epoch=self.epoch),
                keys.ANSWER_TTL_S,
                query.reply_to,
            ],
        )
        return True

    def _answer(self, query: QueryAccount) -> Answer:
        if self.failure is not None:
            return Answer(request_id=query.request_id, failure=Failure.of(self.failure))
        taken_at = wall_ms()
        if self.broker is None:
            listing = Listing(self.orders, behind=0.0 if self.certain else None, reaches=3600.0)
        else:
            listing = self.broker()
        report = build_report(
            query.account_id,
            listing,
            taken_at_ms=taken_at,
            complete=self.complete,
            orders=listing.orders,
        )
        return Answer(request_id=query.request_id, report=encode_report(report))
