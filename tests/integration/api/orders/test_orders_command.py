"""`berth orders` as a process, against a real API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from infra.database.trading import reconciliations
from tests.support.api.orders import demand_attention, place_unknown_order
from tests.support.commands import CommandForker
from tests.support.systems.api import OperatorCommand, ServedApi, StartWorker, operator


@pytest.fixture
async def berth(
    api: ServedApi, commands: CommandForker, tmp_path: Path
) -> AsyncIterator[OperatorCommand]:
    async with operator(api, commands, tmp_path) as berth:
        yield berth


async def test_an_operator_looks_rechecks_and_resolves(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, berth: OperatorCommand
) -> None:
    order = await place_unknown_order(api, user, start_worker)
    assert await berth("orders", "attention") == (0, "no order waits for a person\n", "")
    await demand_attention(api, order, "nobody knows [b]why")
    code, out, _ = await berth("orders", "attention")
    line = out.splitlines()[1]
    assert (code, line.split()[0]) == (0, order["id"])
    assert "buy 1 2330, 0 filled" in line
    assert line.endswith("nobody knows [b]why")
    [row] = json.loads((await berth("orders", "attention", "--json"))[1])
    assert (row["id"], row["known_state"]) == (order["id"], "unknown")

    code, out, _ = await berth("orders", "recheck", order["id"])
    assert (code, out.startswith(f"order {order['id']} is checked again")) == (0, True)
    assert out.endswith("; it stays on the list until it is settled\n")
    end = ("resolve", order["id"], "--state", "filled", "--reason", "seen in the app")
    code, _, err = await berth("orders", *end)
    assert (code, err.split(":")[1].strip()) == (1, "RESOLUTION_INVALID")
    assert "`--filled 1 --price …`" in err
    code, _, err = await berth("orders", *end, "--filled", "1")
    assert "go together: pass `--filled 1 --price …`" in err
    done = await berth("orders", *end, "--filled", "1", "--price", "1005.5")
    assert done == (0, f"order {order['id']} is filled\n", "")
    assert (await berth("orders", "attention"))[1] == "no order waits for a person\n"
    code, _, err = await berth("orders", "recheck", order["id"])
    assert (code, "ORDER_SETTLED" in err) == (1, True)
    assert (await berth("orders", "resolve", order["id"], "--state", "gone", "--reason", "r"))[
        0
    ] == 2


async def test_an_operator_sees_differences_and_closes_one(
    api: ServedApi, berth: OperatorCommand
) -> None:
    assert await berth("orders", "differences") == (0, "no difference waits for a person\n", "")
    async with api.services.database.session() as session:
        row = await reconciliations.note_differences(
            session,
            user_id=api.user,
            account_id="main",
            epoch=1,
            differences={"foreign_orders": ["P[b]1"]},
            blocks=True,
        )
    assert row is not None
    code, out, _ = await berth("orders", "differences")
    line = out.splitlines()[1]
    assert (code, line.split()[:3]) == (0, [str(row.id), api.user, "main"])
    assert line.split("yes")[1].strip() == '{"foreign_orders": ["P[b]1"]}'
    [shown] = json.loads((await berth("orders", "differences", "--json"))[1])
    assert (shown["id"], shown["blocks"]) == (row.id, True)
    done = await berth("orders", "close", str(row.id), "--reason", "bought by hand")
    assert done == (0, f"difference {row.id} is closed\n", "")
    assert (await berth("orders", "differences"))[1] == "no difference waits for a person\n"
    code, _, err = await berth("orders", "close", str(row.id), "--reason", "again")
    assert (code, "RECONCILIATION_NOT_FOUND" in err) == (1, True)
