"""Asks a user's broker for positions and balance, through the user's worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from uuid import uuid4

import msgspec
import structlog

from api.http.errors import NoAnswer
from api.workers.answers import AnswerListener
from api.workers.requests import WorkerRequests
from infra.database import accounts
from infra.database.engine import Database
from worker_runtime.protocol.errors import BerthError, WorkerLost
from worker_runtime.protocol.requests import AccountReport, QueryAccount, decode_report

log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class Portfolio:
    database: Database
    answers: AnswerListener
    worker_requests: WorkerRequests

    async def report(
        self,
        user_id: str,
        account_id: str,
        seconds: float,
        *,
        orders: bool = False,
        positions: bool = False,
        balance: bool = False,
    ) -> AccountReport:
        """Asks the user's worker, and starts it if there is none. Only with `orders` the broker says how far
        behind its lists are.

        Raises `UnknownAccount`, `NoAnswer` after `seconds`, what the worker or the broker said, or why there
        is no worker; `ValkeyUnavailable`. A question that nobody took by then is taken back.
        """
        async with self.database.session() as session:
            await accounts.require_account(session, user_id, account_id)
        query = QueryAccount(
            request_id=f"query:{uuid4()}",
            user_id=user_id,
            account_id=account_id,
            orders=orders,
            positions=positions,
            balance=balance,
            reply_to=self.answers.channel,
            generation=self.answers.generation,
        )
        task = self.worker_requests.send(query, seconds)
        await asyncio.wait({task})
        if task.cancelled():
            raise NoAnswer("this process is stopping")
        answer = task.result()
        if answer.failure is not None:
            raise answer.failure.error()
        try:
            report = decode_report(answer.report or {})
        except msgspec.ValidationError:
            log.error("report_malformed", user=user_id)
            raise BerthError("the worker's report cannot be read") from None
        if balance and report.balance is None:
            raise WorkerLost("the worker's report has no balance")
        return report
