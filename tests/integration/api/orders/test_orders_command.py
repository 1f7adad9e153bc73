"""`berth orders` as a process, against a real API."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from infra.database.trading import reconciliations
from tests.integration.api.conftest import ServedApi, StartWorker, served
from tests.integration.api.orders.test_attention import an_unknown_order, demand

BERTH = str(Path(sys.executable).with_name("berth"))


Berth = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def berth(api: ServedApi, tmp_path: Path) -> AsyncIterator[Berth]:
    """Runs `berth orders` with an operator's key: exit code, output, errors."""
    key_file = tmp_path / "admin.key"
    key_file.touch(mode=0o600)
    key_file.write_text(api.admin_key)
    async with served(api) as url:
        where = ("--url", url.removesuffix("/v1"), "--key-file", str(key_file))

        async def run(*words: str) -> tuple[int, str, str]:
            process = await asyncio.create_subprocess_exec(
                *(BERTH, "orders", *words, *where),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"PATH": "/usr/bin:/bin", "NO_COLOR": "1"},
            )
            out, err = await process.communicate()
            return process.returncode or 0, out.decode(), err.decode()

        yield run


async def test_an_operator_looks_rechecks_and_resolves(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, berth: Berth
) -> None:
    order = await an_unknown_order(api, user, start_worker)
    assert await berth("attention") == (0, "no order waits for a person\n", "")
    await demand(api, order, "nobody knows [b]why")
    code, out, _ = await berth("attention")
    line = out.splitlines()[1]
    assert (code, line.split()[0]) == (0, order["id"])
    assert "buy 1 2330, 0 filled" in line
    assert line.endswith("nobody knows [b]why")
    [row] = json.loads((await berth("attention", "--json"))[1])
    assert (row["id"], row["known_state"]) == (order["id"], "unknown")

    code, out, _ = await berth("recheck", order["id"])
    assert (code, out.startswith(f"order {order['id']} is checked again")) == (0, True)
    end = ("resolve", order["id"], "--state", "filled", "--reason", "seen in the app")
    code, _, err = await berth(*end)
    assert (code, err.split(":")[1].strip()) == (1, "RESOLUTION_INVALID")
    done = await berth(*end, "--filled", "1", "--price", "1005.5")
    assert done == (0, f"order {order['id']} is filled\n", "")
    assert (await berth("attention"))[1] == "no order waits for a person\n"
    code, _, err = await berth("recheck", order["id"])
    assert (code, "ORDER_SETTLED" in err) == (1, True)
    assert (await berth("resolve", order["id"], "--state", "gone", "--reason", "r"))[0] == 2


async def test_an_operator_sees_differences_and_closes_one(api: ServedApi, berth: Berth) -> None:
    assert await berth("differences") == (0, "no difference waits for a person\n", "")
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
    code, out, _ = await berth("differences")
    line = out.splitlines()[1]
    assert (code, line.split()[:3]) == (0, [str(row.id), api.user, "main"])
    assert line.split("yes")[1].strip() == '{"foreign_orders": ["P[b]1"]}'
    [shown] = json.loads((await berth("differences", "--json"))[1])
    assert (shown["id"], shown["blocks"]) == (row.id, True)
    done = await berth("close", str(row.id), "--reason", "bought by hand")
    assert done == (0, f"difference {row.id} is closed\n", "")
    assert (await berth("differences"))[1] == "no difference waits for a person\n"
    code, _, err = await berth("close", str(row.id), "--reason", "again")
    assert (code, "RECONCILIATION_NOT_FOUND" in err) == (1, True)
