"""Instruments over REST and on the command line: look-up, who lists them, loads and changed
lots."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import text
from temporalio.client import Client

from api.fleet.alerts import CONDITIONS
from api.instruments.service import InstrumentLists
from infra.database.trading import instrument_loads
from infra.local.servers import TemporalServer
from infra.market.calendar import MarketCalendars
from infra.market.list_age import MAX_MISSED_DAYS
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, make_key, operator
from worker_runtime.protocol.instruments import Instrument, InstrumentKind, PriceStep
from workflows import names

DAY = date(2026, 11, 23)
STOCK = Instrument(
    code="2330",
    name="台積電",
    market="stock",
    kind=InstrumentKind.STOCK,
    lot_units=1000,
    lot_value=Decimal(1000),
    ticks=(PriceStep(below=Decimal(10), tick=Decimal("0.01")), PriceStep(tick=Decimal("0.05"))),
    reference=Decimal("912.5"),
    limit_up=Decimal(1000),
    limit_down=Decimal("821.5"),
    day_trade=True,
)
OPTIONS = [
    Instrument(
        code=f"TXO{strike}A6",
        name=f"TAIEX call {strike}",
        market="futures",
        kind=InstrumentKind.OPTION,
        lot_units=1,
        lot_value=Decimal(50),
        expires_on=date(2027, 1, 20),
        underlying="TX",
    )
    for strike in range(20000, 20500, 100)
]


@pytest.fixture
async def staff(api: ServedApi) -> AsyncIterator[httpx.AsyncClient]:
    async with api.client(await make_key(api.settings, "operator")) as client:
        yield client


@pytest.fixture
async def lists(api: ServedApi) -> str:
    """A user with an account at paper who does not trade."""
    async with api.client(api.admin_key) as admin:
        created = await admin.post("/users", json={"user_id": "lists", "scopes": ["read"]})
        assert created.status_code == 201, created.text
        stored = await admin.put(
            "/users/lists/accounts/main/credentials",
            json={"broker": "paper", "api_key": "a", "secret_key": "b"},
        )
        assert stored.status_code == 200, stored.text
    return "lists"


async def load(api: ServedApi, *listed: Instrument, day: date = DAY) -> None:
    """A load as the orchestrator makes it."""
    database = api.services.database
    begun = await database.write(instrument_loads.begin_load, "paper", day)
    await database.write(instrument_loads.stage_page, begun.id, listed)
    await database.write(instrument_loads.switch_list, begun.id)


async def designate(staff: httpx.AsyncClient, user_id: str) -> httpx.Response:
    body = {"user_id": user_id, "account_id": "main"}
    return await staff.put("/instruments/sources/paper", json=body)


async def newest_act(api: ServedApi) -> dict[str, Any]:
    async with api.client(api.admin_key) as admin:
        answer = await admin.get("/audit", params={"limit": 1})
    newest: dict[str, Any] = answer.json()["entries"][0]
    return newest


async def test_users_look_instruments_up_by_code_and_name(
    api: ServedApi, user: httpx.AsyncClient, staff: httpx.AsyncClient, lists: str
) -> None:
    await designate(staff, lists)
    await load(api, STOCK, *OPTIONS)
    row = (await user.get("/instruments/paper/2330")).json()
    assert row["name"] == "台積電"
    assert (row["lot_value"], row["reference"], row["limit_down"]) == ("1000", "912.5", "821.5")
    assert row["ticks"] == [{"below": "10", "tick": "0.01"}, {"below": None, "tick": "0.05"}]
    assert (row["loaded_on"], row["listed"]) == ("2026-11-23", True)

    async def codes(**query: Any) -> list[str]:
        answer = await user.get("/instruments", params=query)
        assert answer.status_code == 200, answer.text
        return [each["code"] for each in answer.json()["instruments"]]

    assert await codes(query="23") == ["2330"]
    assert await codes(query="taiex CALL 203") == ["TXO20300A6"]
    assert await codes(kind="stock", broker="paper") == ["2330"]
    assert len(await codes(market="futures")) == 5
    assert await codes(broker="quay") == []

    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        page = (await user.get("/instruments", params={"after": after, "limit": 2})).json()
        seen += [each["code"] for each in page["instruments"]]
        after = page["next_cursor"]
    assert seen == ["2330", *(option.code for option in OPTIONS)]

    missing = await user.get("/instruments/paper/9999")
    assert (missing.status_code, missing.json()["code"]) == (404, "INSTRUMENT_NOT_FOUND")
    assert (await user.get("/instruments", params={"kind": "system"})).status_code == 422


async def test_only_an_account_of_a_user_who_does_not_trade_lists_instruments(
    api: ServedApi, user: httpx.AsyncClient, staff: httpx.AsyncClient, lists: str
) -> None:
    refused = await designate(staff, api.user)  # has a key that may trade
    assert (refused.status_code, refused.json()["code"]) == (409, "INSTRUMENT_SOURCE_TRADES")
    missing = await designate(staff, "nobody")
    assert (missing.status_code, missing.json()["code"]) == (404, "INSTRUMENT_SOURCE_MISSING")
    assert (await user.get("/instruments/sources")).status_code == 403
    assert (await designate(user, lists)).status_code == 403

    view = (await designate(staff, lists)).json()
    assert (view["user_id"], view["account_id"], view["loaded_on"]) == ("lists", "main", None)
    assert (await newest_act(api))["action"] == "instrument_source.set"

    assert (await staff.delete("/instruments/sources/paper")).status_code == 204
    assert (await newest_act(api))["action"] == "instrument_source.deleted"
    assert (await staff.delete("/instruments/sources/paper")).status_code == 404
    assert (await staff.get("/instruments/sources")).json() == {"sources": []}
    again = await staff.post("/instruments/sources/paper/load", json={})
    assert (again.status_code, again.json()["code"]) == (404, "INSTRUMENT_SOURCE_MISSING")


async def test_a_changed_lot_is_shown_and_approved_once(
    api: ServedApi, user: httpx.AsyncClient, staff: httpx.AsyncClient, lists: str
) -> None:
    await designate(staff, lists)
    await load(api, STOCK)
    await load(api, msgspec.structs.replace(STOCK, lot_units=100, lot_value=Decimal(100)))
    [change] = (await staff.get("/instruments/changes")).json()["changes"]
    assert (change["old_lot_units"], change["new_lot_units"]) == (1000, 100)
    assert (await user.get("/instruments/paper/2330")).json()["lot_units"] == 1000
    assert (await user.get("/instruments/changes")).status_code == 403

    path = f"/instruments/changes/{change['id']}/approve"
    assert (await staff.post(path, json={"reason": ""})).status_code == 422
    approved = await staff.post(path, json={"reason": "the exchange announced it"})
    assert (approved.status_code, approved.json()["resolution"]) == (200, "approved")
    assert (await user.get("/instruments/paper/2330")).json()["lot_units"] == 100
    entry = await newest_act(api)
    assert (entry["action"], entry["data"]["reason"]) == (
        "instrument_change.approved",
        "the exchange announced it",
    )
    again = await staff.post(path, json={"reason": "once more"})
    assert (again.status_code, again.json()["code"]) == (404, "INSTRUMENT_CHANGE_NOT_FOUND")


async def test_a_load_by_hand_begins_at_once_or_hurries_the_one_that_waits(
    api: ServedApi, staff: httpx.AsyncClient, lists: str, temporal_server: TemporalServer
) -> None:
    await designate(staff, lists)
    away = await staff.post("/instruments/sources/paper/load", json={})
    assert (away.status_code, away.json()["code"]) == (503, "TEMPORAL_UNAVAILABLE")
    assert (await newest_act(api))["action"] == "instruments.load_requested"

    temporal = await Client.connect(temporal_server.address)
    api.services.instrument_lists = InstrumentLists(
        temporal, api.services.database, MarketCalendars()
    )
    for accept_smaller in (False, True):
        begun = await staff.post(
            "/instruments/sources/paper/load", json={"accept_smaller": accept_smaller}
        )
        assert begun.status_code == 202, begun.text
    [workflow_id] = begun.json()["workflow_ids"]
    assert workflow_id == names.instrument_load_id("paper", begun.json()["trading_day"], "stock")
    handle = temporal.get_workflow_handle(workflow_id)
    signals = [
        event.workflow_execution_signaled_event_attributes.signal_name
        async for event in handle.fetch_history_events()
        if event.HasField("workflow_execution_signaled_event_attributes")
    ]
    assert signals == ["load_now", "load_now"]
    await handle.terminate("the test is over")


async def test_an_old_list_a_refused_one_and_a_changed_lot_alert(
    api: ServedApi, staff: httpx.AsyncClient, lists: str
) -> None:
    await designate(staff, lists)

    async def samples() -> dict[str, float]:
        lines = (await staff.get("/metrics")).text.splitlines()
        shown = [line.rsplit(" ", 1) for line in lines if line.startswith("berth_instrument")]
        return {name: float(value) for name, value in shown}

    assert "berth_instruments_missed_days" not in str(await samples())  # none was ever loaded
    today, _ = await api.services.instrument_lists.require_markets("paper")
    await load(api, STOCK, day=today)
    assert (await samples())['berth_instruments_missed_days{broker="paper",market="stock"}'] == 0

    async with api.services.database.session() as session:
        await session.execute(text("update instrument_loads set trading_day = trading_day - 9"))
    await load(api, STOCK, *OPTIONS, day=today - timedelta(days=9))
    begun = await api.services.database.write(instrument_loads.begin_load, "paper", today)
    await api.services.database.write(
        instrument_loads.end_load, begun.id, refused=True, error="it is empty"
    )
    now = await samples()
    assert now['berth_instruments_missed_days{broker="paper",market="stock"}'] > 2
    assert now['berth_instrument_loads_failing{broker="paper",market="stock",state="refused"}'] == 1
    assert now["berth_instrument_changes_open"] == 0
    [old] = [
        condition for condition in CONDITIONS if condition.metric == "berth_instruments_missed_days"
    ]
    assert (old.holds(3, 0.0), old.holds(2, 0.0)) == (True, False)
    [source] = (await staff.get("/instruments/sources")).json()["sources"]
    assert source["last_load"]["error"] == "it is empty"
    assert source["missed_days"] > 2


async def test_an_old_list_alerts_until_its_source_is_deleted_though_its_account_was_removed(
    api: ServedApi, staff: httpx.AsyncClient, lists: str
) -> None:
    await designate(staff, lists)
    today, _ = await api.services.instrument_lists.require_markets("paper")
    await load(api, STOCK, day=today - timedelta(days=9))
    async with api.client(api.admin_key) as admin:
        removed = await admin.request(
            "DELETE", "/users/lists/accounts/main", params={"reason": "moved"}
        )
        assert removed.is_success, removed.text
    metric = 'berth_instruments_missed_days{broker="paper",market="stock"}'
    lines = (await staff.get("/metrics")).text.splitlines()
    [missed] = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric)]
    assert missed > MAX_MISSED_DAYS
    [source] = (await staff.get("/instruments/sources")).json()["sources"]
    assert (source["user_id"], source["account_removed"]) == ("lists", True)
    refused = await staff.post("/instruments/sources/paper/load", json={})
    assert (refused.status_code, refused.json()["code"]) == (404, "INSTRUMENT_SOURCE_MISSING")

    deleted = await staff.delete("/instruments/sources/paper", params={"market": "stock"})
    assert deleted.status_code == 204
    assert metric not in (await staff.get("/metrics")).text


async def test_operators_do_the_same_on_the_command_line(
    api: ServedApi,
    lists: str,
    commands: CommandForker,
    tmp_path: Path,
) -> None:
    async with operator(api, commands, tmp_path) as run:
        done = await run("instruments", "source", "set", "paper", lists, "main")
        assert "account main of lists, market stock, lists the instruments of paper" in done.out
        await load(api, STOCK, *OPTIONS)
        listed = await run("instruments", "list", "--json", "--limit", "3")
        assert [row["code"] for row in json.loads(listed.out)] == [
            "2330",
            "TXO20000A6",
            "TXO20100A6",
        ]
        assert "台積電" in (await run("instruments", "list", "2330")).out
        shown = (await run("instruments", "show", "paper", "2330")).out
        assert "ticks: 0.01 below 10, 0.05 above" in shown
        await load(api, msgspec.structs.replace(STOCK, lot_units=500), *OPTIONS)
        [change] = json.loads((await run("instruments", "changes", "--json")).out)
        approved = await run("instruments", "approve", str(change["id"]), "--reason", "announced")
        assert "has 500 units now" in approved.out
        assert "loaded" in (await run("instruments", "source", "list")).out
        deleted = await run("instruments", "source", "delete", "paper")
        assert "are loaded no more" in deleted.out
