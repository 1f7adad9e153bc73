"""`berth orders`: an order is placed, listed, shown and cancelled from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, StartWorker, operator


async def test_an_order_is_placed_listed_and_shown(
    api: ServedApi, start_worker: StartWorker, commands: CommandForker, tmp_path: Path
) -> None:
    await start_worker(api.user)
    async with operator(api, commands, tmp_path) as berth:
        words = (api.user, "main", "buy", "1", "2330", "--price", "1005.5", "--id", "mine")
        placed = await berth("orders", "place", *words)
        assert placed.code == 0, placed.err
        assert "buy 1 2330 is filled, 1 filled at" in placed.out
        again = json.loads((await berth("orders", "place", *words, "--json")).out)
        assert placed.out.startswith(f"order {again['id']}:")
        listed = await berth("orders", "list", api.user)
        assert listed.out.count(again["id"]) == 1, listed.out
        of_all = json.loads((await berth("orders", "list", "--limit", "500", "--json")).out)
        assert (api.user, again["id"]) in {(order["user_id"], order["id"]) for order in of_all}
        assert (
            "no such order" in (await berth("orders", "list", api.user, "--state", "expired")).out
        )
        shown = await berth("orders", "show", again["id"])
        assert "accepted" in shown.out
        unknown = await berth("orders", "cancel", "0" * 32)
        assert "ORDER_NOT_FOUND" in unknown.err
        unknown = await berth("orders", "replace", "0" * 32, "--price", "1")
        assert "ORDER_NOT_FOUND" in unknown.err
