"""Asks a user's broker for positions and balance, through the user's worker."""

from __future__ import annotations

import asyncio
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


class Portfolio:
    def __init__(self, database: Database, answers: AnswerListener, worker_requests: WorkerRequests) -> None:
        self._database = database
        self._answers = answers
        self._worker_requests = worker_requests
        self._log = structlog.get_logger()

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
        async with self._database.session() as session:
            await accounts.require_account(session, user_id, account_id)
        query = QueryAccount(
            request_id=f"query:{uuid4()}",
            user_id=user_id,
            account_id=account_id,
            orders=orders,
            positions=positions,
            balance=balance,
            reply_to=self._answers.channel,
            generation=self._answers.generation,
        )
        task = self._worker_requests.send(query, seconds)
        await asyncio.wait({task})
        if task.cancelled():
            raise NoAnswer("this process is stopping")
        answer = task.result()
        if answer.failure is not None:
            raise answer.failure.error()
        try:
            report = decode_report(answer.report or {})
        except msgspec.ValidationError:
            self._log.error("report_malformed", user=user_id)
            raise BerthError("the worker's report cannot be read") from None
        if balance and report.balance is None:
            raise WorkerLost("the worker's report has no balance")
        return report
