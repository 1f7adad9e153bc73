"""An API process whose clock is ten minutes off: deadlines are PostgreSQL's, and mean the same
everywhere."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from infra.database.orders import watch
from tests.support.api.orders import send_intent, start_worker_holding, submitted_orders
from tests.support.api.scripted_answers import answer_change_done, answer_submitted
from tests.support.systems.api import Serve, ServedApi, StartWorker, alive, an_order
from worker_runtime.protocol import keys
from worker_runtime.protocol.requests import ReplaceOrder

#: Python imports this module when it starts. The types of the C modules are changed in place,
#: because others ask for them by name.
HOOK = """
import ctypes, datetime, gc, time

OFF = {off}
now, clock, clock_ns = datetime.datetime.now, time.time, time.time_ns
found = gc.get_referents(datetime.datetime.__dict__)[0]
found["now"] = classmethod(lambda cls, tz=None: now(tz) + datetime.timedelta(seconds=OFF))
ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
time.time = lambda: clock() + OFF
time.time_ns = lambda: clock_ns() + OFF * 1_000_000_000
"""


@dataclass
class Skewed:
    """A process with another clock, next to one with the right clock."""

    api: ServedApi
    off: int
    client: httpx.AsyncClient
    right: httpx.AsyncClient

    async def awaited(self) -> None:
        """A worker that is about to come: the API queues orders for it."""
        await self.api.services.valkey.set(keys.mark(self.api.user), "1:scripted", ex=60)

    async def place(
        self, client: httpx.AsyncClient, number: int = 1, wait: float = 0.0
    ) -> httpx.Response:
        answer = await client.post(
            f"/users/{self.api.user}/orders?wait={wait}", json=an_order(number)
        )
        assert answer.status_code in (200, 201, 202), answer.text
        return answer


@pytest.fixture(params=[-600, 600], ids=["ten minutes behind", "ten minutes ahead"])
async def skewed(
    request: pytest.FixtureRequest,
    api: ServedApi,
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Skewed]:
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK.format(off=request.param))
    monkeypatch.setenv("PYTHONPATH", str(hook))
    monkeypatch.setenv("BERTH_LOCAL_PASS_ENVIRONMENT", '["PYTHONPATH"]')
    _, url = serve(1)
    await alive(url)
    headers = {"X-API-Key": api.key}
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, timeout=40) as client,
        api.client(api.key) as right,
    ):
        yield Skewed(api, request.param, client, right)


async def test_a_clock_that_is_off_changes_no_deadline(
    skewed: Skewed, start_worker: StartWorker
) -> None:
    api, right = skewed.api, skewed.right
    await skewed.awaited()
    order_id = (await skewed.place(skewed.client)).json()["id"]
    async with api.services.database.session() as session:
        await session.execute(text("update orders set verify_at = clock_timestamp()"))
    async with api.services.database.session() as session:
        (due,) = await watch.take_due_orders(session, limit=10, lease=1.0, grace=0.0)
    lasts = api.settings.order_deadline
    assert (str(due.order.id), due.overdue) == (order_id, False)
    assert lasts - 15 < due.seconds_left <= lasts

    # Each takes up what the other one has accepted.
    other_id = (await skewed.place(right, 2)).json()["id"]
    repeats = [
        asyncio.create_task(skewed.place(client, number, wait=10))
        for client, number in ((right, 1), (skewed.client, 1), (skewed.client, 2))
    ]
    worker = await start_worker(api.user, answer_submitted)
    assert [(await repeat).json()["state"] for repeat in repeats] == ["submitted"] * 3
    assert [order.order_id for order in worker.popped] == [order_id, other_id]
    seen = await skewed.client.get(f"/orders/{other_id}")
    assert seen.json()["state"] == "submitted", (
        "the answer in Valkey counts until PostgreSQL has it"
    )

    # A change is sent once, whichever process is asked.
    worker.reply = answer_change_done
    body = {"request_id": "r", "price": "1000"}
    for client in (skewed.client, right):
        answer = await client.post(f"/orders/{order_id}/replace?wait=10", json=body)
        assert answer.status_code == 200, answer.text
    assert [type(asked) for asked in worker.asked] == [ReplaceOrder]


async def test_a_reversal_opens_its_new_side(skewed: Skewed, start_worker: StartWorker) -> None:
    worker = await start_worker_holding(skewed.api, start_worker, -2)
    answer = await send_intent(skewed.client, skewed.api, "long_entry", quantity=3)
    assert (answer.status_code, answer.json()["complete"]) == (200, True), answer.text
    assert submitted_orders(worker) == [("buy", 2, True), ("buy", 3, False)]
