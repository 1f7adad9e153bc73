"""The client before a real API: what it returns and raises, over a network that fails, and past its
death."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest

from infra.client.errors import ApiError
from infra.client.models import (
    BrokerCredentials,
    OpenOrders,
    OrderHistory,
    OrderSnapshot,
    OrderTicket,
    PresentWorkerState,
)
from infra.database.engine import Database
from infra.database.orders import recording
from infra.settings import Settings
from tests.support.api.operators import record_transitions
from tests.support.api.orders import record_order_state, write_orders
from tests.support.api.scripted_answers import answer_anything
from tests.support.clients.connections import Connect, line_to
from tests.support.systems.api import Serve, ServedApi, StartWorker, alive, make_key, served
from tests.support.workers.api_worker import filled, silent
from worker_runtime.protocol.messages import OrderEvent, OrderState

PAGE = Path(__file__).resolve().parents[4] / "docs" / "how-to" / "python-client.md"


def a_ticket(**changes: str) -> OrderTicket:
    given = {"account_id": "main", "symbol": "2330", "side": "buy", "price_type": "MKT"} | changes
    return OrderTicket(**given, quantity=1, time_in_force="IOC")  # type: ignore[arg-type]


async def test_the_operations_of_the_client_are_those_of_the_api(
    api: ServedApi, start_worker: StartWorker, connect: Connect
) -> None:
    worker = await start_worker(api.user)
    worker.reply = answer_anything
    async with (
        served(api) as url,
        connect(url, api.admin_key) as admin,
        connect(url, api.key) as call,
    ):
        made = await admin("create_user")
        with pytest.raises(ApiError, match="USER_EXISTS"):
            await admin("create_user", made.user_id)
        secret = BrokerCredentials(
            broker="paper", api_key="a", secret_key="b", ca_certificate=b"\x00\xff"
        )
        stored = await admin("store_credentials", made.user_id, "main", secret)
        assert (stored.account_id, stored.version, stored.simulation) == ("main", 1, True)

        ticket = a_ticket()
        order = await call("place_order", api.user, ticket)
        assert (order.state, order.filled_quantity) == ("filled", 1)
        assert (await call("place_order", api.user, ticket, wait=5)).id == order.id
        seen = await call("get_order", order.id)
        assert isinstance(seen, OrderHistory)
        assert (seen.average_price, seen.timeline[0].step) == (order.average_price, "accepted")
        page = await call(
            "list_orders", api.user, client_order_id=ticket.client_order_id, state=["open", "final"]
        )
        assert ([listed.id for listed in page.orders], page.next_cursor) == ([order.id], None)
        positions = await call("get_positions", api.user, "main")
        assert [(position.symbol, position.quantity) for position in positions.positions] == [
            ("2330", 2)
        ]
        assert (await call("get_balance", api.user, "main")).currency == "TWD"

        for refused, code in (
            (call("cancel_order", order.id), "ORDER_SETTLED"),
            (call("place_order", api.user, a_ticket(account_id="none")), "UNKNOWN_ACCOUNT"),
            (call("place_order", api.user, a_ticket(side="both")), "INVALID_REQUEST"),
            (call("create_user", "somebody"), "FORBIDDEN"),
            (call("get_worker", "somebody"), "NOT_FOUND"),
        ):
            with pytest.raises(ApiError, match=f"^{code}: "):
                await refused
        reply_of = await admin("request", "GET", "/api-keys", query={"user_id": api.user})
        assert (reply_of.done, len(reply_of.body["api_keys"])) == (True, 1)
    assert len(worker.popped) == 1


async def test_keys_are_made_looked_at_rotated_and_revoked(
    api: ServedApi, connect: Connect
) -> None:
    async with served(api) as url, connect(url, api.admin_key) as admin:
        made = await admin(
            "create_api_key",
            "bot",
            user_id=api.user,
            scopes=["read"],
            sources=["127.0.0.1"],
            days=7,
        )
        assert (made.scopes, made.sources) == (("read",), ("127.0.0.1/32",))
        assert made.api_key not in repr(made)
        async with connect(url, made.api_key) as bot:
            own = await bot("get_own_key")
            assert (own.id, own.label, own.unrestricted) == (made.id, "bot", False)
            with pytest.raises(ApiError, match=r"SCOPE_MISSING: .*`trade`"):
                await bot("place_order", api.user, a_ticket())
            with pytest.raises(ApiError, match="`keys`"):
                await bot("rotate_api_key")
            assert (await bot("revoke_api_key")).revoked_at is not None
        async with connect(url, api.key) as user:
            [first] = (await user("list_api_keys")).api_keys
            rotated = await user("rotate_api_key", overlap_hours=0)
            assert rotated.scopes == first.scopes
        async with connect(url, rotated.api_key) as user:
            assert [key.id for key in (await user("list_api_keys")).api_keys] == [rotated.id]
            ended = (await user("list_api_keys", api.user, revoked=True)).api_keys
            assert {made.id, first.id} <= {key.id for key in ended}


async def test_orders_whose_answers_are_lost_are_placed_once(
    api: ServedApi, start_worker: StartWorker, connect: Connect
) -> None:
    worker = await start_worker(api.user)
    async with served(api) as url, line_to(url) as line, connect(line.url, api.key) as call:
        for lost in (1, 2):
            line.lose = lost
            assert (
                await call("place_order", api.user, a_ticket(symbol=f"S{lost}"))
            ).state == "filled"
            assert line.lose == 0
        page = await call("list_orders", api.user)
    assert [order.symbol for order in page.orders] == ["S2", "S1"]
    assert [order.symbol for order in worker.popped] == ["S1", "S2"]


async def test_no_event_is_left_out_on_a_line_that_is_cut(api: ServedApi, connect: Connect) -> None:
    """Changes of a worker: each is an event of its own, so that every one has to come, in order."""
    async with served(api) as url, line_to(url) as line, connect(line.url, api.key) as call:
        stream = call.client.follow_worker(api.user)
        assert isinstance((await call.take(stream)).data, PresentWorkerState)
        seen = []
        for begin in (0, 10, 20):
            writing = asyncio.create_task(note_steps(api, begin, begin + 10))
            seen += [await call.take(stream) for _ in range(4)]
            line.cut()
            seen += [await call.take(stream) for _ in range(6)]
            await writing
        assert line.made >= 3
        await call.leave(stream)
        behind = call.client.follow_worker(api.user, after=seen[-2].id)
        assert (await call.take(behind)).data.after == "step-29"
        await call.leave(behind)
    assert [event.data.after for event in seen] == [f"step-{number}" for number in range(30)]


async def note_steps(api: ServedApi, begin: int, end: int) -> None:
    for number in range(begin, end):
        await record_transitions(api, "Active", f"step-{number}", first=number)


async def test_texts_with_line_separators_are_events_like_others(
    api: ServedApi, connect: Connect
) -> None:
    """A broker's reason may hold characters at which `str.splitlines` ends a line."""
    async with served(api) as url, connect(url, api.key) as call:
        stream = call.client.follow_orders(api.user)
        await call.take(stream)
        (order_id,) = await write_orders(api)
        await record_order_state(api, order_id, reason="first\u2028second\x85third")
        event = await call.take(stream)
        while event.data.state == "accepted":
            event = await call.take(stream)
        await call.leave(stream)
    assert event.data.reason == "first\u2028second\x85third"


@pytest.mark.slow
async def test_an_api_that_is_killed_in_the_middle_loses_no_order_or_event_and_places_none_twice(
    serve: Serve, settings: Settings, start_worker: StartWorker, connect: Connect
) -> None:
    process, url = serve(1)
    await alive(url)
    worker = await start_worker("alice", silent)
    async with connect(url, await make_key(settings, "admin")) as call:
        await call("create_user", "alice")
        await call(
            "store_credentials",
            "alice",
            "main",
            BrokerCredentials(broker="paper", api_key="a", secret_key="b"),
        )
        stream = call.client.follow_orders("alice")
        assert isinstance((await call.take(stream)).data, OpenOrders)
        placing = asyncio.create_task(call("place_order", "alice", a_ticket()))
        # The worker has it; nobody knows of its answer.
        await asyncio.wait_for(worker.taken.wait(), 30)
        process.kill()
        await asyncio.to_thread(process.wait)
        serve(1)
        await alive(url)
        await worker.answer_later(filled(worker.popped[0]))
        order = await asyncio.wait_for(placing, 30)
        assert isinstance(order, OrderSnapshot)
        assert (order.state, UUID(order.id)) == ("filled", UUID(worker.popped[0].order_id))
        await record_fill(settings, order)
        event = await call.take(stream)
        while not event.data.final:
            event = await call.take(stream)
        assert (event.data.id, event.data.state) == (order.id, "filled")
        await call.leave(stream)
        page = await call("list_orders", "alice")
    assert [listed.id for listed in page.orders] == [order.id]
    assert len(worker.popped) == 1


async def record_fill(settings: Settings, order: OrderSnapshot) -> None:
    """As the recorder writes what a worker reports."""
    event = OrderEvent(
        event_id=f"{order.id}:filled",
        order_id=order.id,
        user_id=order.user_id,
        epoch=1,
        state=OrderState.FILLED,
        filled_quantity=1,
        at_ms=1_795_410_000_000,
    )
    database = Database(settings.database_url, pool_size=1)
    try:
        async with database.session() as session:
            await recording.record_events(session, [event])
    finally:
        await database.close()


async def test_the_program_of_the_page_does_what_the_page_says(
    api: ServedApi, start_worker: StartWorker, client_distribution: Path, tmp_path: Path
) -> None:
    """With the installed distribution, in a process that sees nothing else of Berth."""
    text = PAGE.read_text(encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(text.split("```python\n")[1].split("```")[0], encoding="utf-8")
    keys = {"broker": "paper", "api_key": "k", "secret_key": "s", "person_id": ""}
    # As `berth exchange account add` prints them.
    (tmp_path / "bob-1.json").write_text(json.dumps(keys))
    worker = await start_worker("bob")
    async with served(api) as url:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-I", "-c", _RUN, str(client_distribution), str(program)],
            env={"BERTH_URL": url.removesuffix("/v1"), "BERTH_ADMIN_KEY": api.admin_key},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    stored, first, *events = done.stdout.splitlines()
    assert (stored, first) == ("keys: not_tried", "placed: filled")
    assert events[-1].endswith("filled")
    assert len(worker.popped) == 1


#: Runs a program with a folder of packages, and without the folder that it is called from.
_RUN = (
    "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2], "
    "run_name='__main__')"
)
