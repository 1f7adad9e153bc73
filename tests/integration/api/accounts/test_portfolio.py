"""Positions and balance: asked through the user's queue, with a deadline and a reason when there is
none."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import httpx
import pytest

from tests.support.api.scripted_answers import answer_positions, make_position
from tests.support.systems.api import ServedApi, StartWorker
from tests.support.waiting import until
from tests.support.workflows.user_worker_stub import LifecycleStub
from worker_runtime.protocol import keys
from worker_runtime.protocol.broker_reports import Balance
from worker_runtime.protocol.messages import Answer, Failure
from worker_runtime.protocol.requests import QueryAccount


async def test_positions_are_what_the_broker_says(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    worker.reply = answer_positions(
        make_position("MXFA6", -3), make_position("2330", 2), make_position("2317", 0)
    )
    answer = await user.get(f"/users/{api.user}/accounts/main/positions")
    assert answer.status_code == 200, answer.text
    usual = {"odd_shares": 0, "condition": "cash", "average_price": "1001.5"}
    assert answer.json() == {
        "user_id": api.user,
        "account_id": "main",
        "taken_at": "2027-01-15T08:00:00.500000Z",
        "positions": [
            {"symbol": "2330", "direction": "long", "quantity": 2} | usual,
            {"symbol": "MXFA6", "direction": "short", "quantity": 3} | usual,
        ],
    }
    (asked,) = worker.asked
    assert isinstance(asked, QueryAccount)
    assert (asked.orders, asked.positions, asked.balance) == (False, True, False)


async def test_the_balance_is_what_the_broker_says(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    worker.reply = answer_positions(
        balance=Balance(currency="TWD", cash=Decimal("10.50"), available=Decimal("-2"))
    )
    body = (await user.get(f"/users/{api.user}/accounts/main/balance")).json()
    assert (body["currency"], body["cash"], body["available"]) == ("TWD", "10.5", "-2")


async def test_a_question_starts_the_worker(whole_api: ServedApi, lifecycle: LifecycleStub) -> None:
    async with whole_api.client(whole_api.key) as user:
        path = f"/users/{whole_api.user}/accounts/main/positions"
        asking = asyncio.create_task(user.get(f"{path}?wait=60"))
        # The worker that is started for it takes the question, and knows no answer.
        await until(lambda: any(worker.asked for worker in lifecycle.workers))
        (worker,) = lifecycle.workers
        assert (await user.get(f"{path}?wait=0.2")).status_code == 504
        worker.reply = reply = answer_positions(make_position("2330", 1))
        answer = await user.get(path)
        assert (answer.status_code, len(answer.json()["positions"])) == (200, 1)
        await worker.answer(b"", reply(worker.asked[0]), worker.asked[0].reply_to)
        first = await asking
    assert (first.status_code, first.json()) == (200, answer.json())
    assert len(lifecycle.calls) == 1


async def test_without_an_answer_in_time_the_question_is_taken_back(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    await api.services.valkey.set(keys.mark(api.user), "1:gone", ex=30)
    answer = await user.get(f"/users/{api.user}/accounts/main/positions?wait=0.2")
    assert (answer.status_code, answer.json()["code"]) == (504, "NO_ANSWER")
    assert answer.headers["retry-after"] == "1"
    assert await api.services.valkey.llen(keys.requests(api.user)) == 0


async def test_without_temporal_there_is_no_worker_and_the_answer_says_so(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    answer = await user.get(f"/users/{api.user}/accounts/main/balance")
    assert (answer.status_code, answer.json()["code"]) == (503, "TEMPORAL_UNAVAILABLE")
    assert await api.services.valkey.llen(keys.requests(api.user)) == 0


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("BROKER_UNREACHABLE", 503),
        ("BROKER_MAINTENANCE", 503),
        ("RATE_LIMITED", 429),
        ("LOGIN_REJECTED", 422),
        ("WORKER_LOST", 503),
    ],
)
async def test_what_the_worker_could_not_learn_is_a_problem(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, code: str, status: int
) -> None:
    worker = await start_worker(api.user)
    worker.reply = lambda question: Answer(
        request_id=question.request_id, failure=Failure(code=code, detail="why")
    )
    answer = await user.get(f"/users/{api.user}/accounts/main/balance")
    assert (answer.status_code, answer.json()["code"], answer.json()["detail"]) == (
        status,
        code,
        "why",
    )


async def test_a_report_that_cannot_be_read_is_an_error_of_ours(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    worker.reply = lambda question: Answer(
        request_id=question.request_id, report={"positions": "many"}
    )
    answer = await user.get(f"/users/{api.user}/accounts/main/positions")
    assert (answer.status_code, answer.json()["code"]) == (500, "INTERNAL")


@pytest.mark.parametrize("resource", ["positions", "balance"])
async def test_a_question_that_cannot_be_meant_is_refused(
    api: ServedApi, user: httpx.AsyncClient, resource: str
) -> None:
    path = f"/users/{api.user}/accounts/main/{resource}"
    for wait in ("0", "-1", "61", "nan", "soon"):
        answer = await user.get(path, params={"wait": wait})
        assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")
    unknown = await user.get(f"/users/{api.user}/accounts/other/{resource}")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "ACCOUNT_NOT_FOUND")
    malformed = await user.get(f"/users/{api.user}/accounts/{{x}}/{resource}")
    assert (malformed.status_code, malformed.json()["code"]) == (422, "INVALID_REQUEST")
    foreign = await user.get(f"/users/somebody-else/accounts/main/{resource}")
    assert (foreign.status_code, foreign.json()["code"]) == (404, "NOT_FOUND")
