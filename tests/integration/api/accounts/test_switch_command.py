"""`berth halt`, `reduce`, `open` and `switches` as processes, against a real API."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, an_order, operator


async def test_an_operator_halts_reduces_and_opens(
    api: ServedApi, user: httpx.AsyncClient, commands: CommandForker, tmp_path: Path
) -> None:
    async with operator(api, commands, tmp_path) as berth:
        of_user = ("--user", api.user)
        assert await berth("halt", *of_user, "--reason", "a test") == (
            0,
            f"{api.user} is halted\n",
            "",
        )
        refused = await user.post(f"/users/{api.user}/orders", json=an_order())
        assert refused.json()["code"] == "TRADING_HALTED"
        account = (*of_user, "--account", "main")
        assert (await berth("reduce", *account, "--reason", "a [b]test"))[
            1
        ] == f"{api.user} main is reducing\n"
        await berth("halt", "--all", "--reason", "everything burns")
        still = (await berth("open", *of_user, "--reason", "over"))[1]
        assert still.startswith(f"the switch of {api.user} is open, but everybody is halted by ")
        assert still.endswith(" UTC: everything burns\n")
        assert (await berth("open", "--all", "--reason", "over"))[1] == "everybody is open\n"

        code, out, _ = await berth("switches", *of_user)
        lines = [line.split() for line in out.splitlines()]
        assert code == 0
        assert [line[:2] for line in lines[1:3]] == [["everybody", "open"], [api.user, "open"]]
        assert (lines[3][:3], lines[3][-2:]) == ([api.user, "main", "reducing"], ["a", "[b]test"])
        assert out.splitlines()[-1] == "in effect: all accounts open, main reducing"
        listed = json.loads((await berth("switches", *of_user, "--json"))[1])
        assert listed["effective"]["accounts"] == {"main": "reducing"}

        code, _, err = await berth("halt", "--user", "nobody", "--reason", "a test")
        assert (code, err) == (1, "error: USER_NOT_FOUND: there is no user nobody\n")
        for wrong in (["--all", *of_user], [], ["--all", "--account", "main"]):
            code, _, err = await berth("halt", *wrong, "--reason", "a test")
            assert code == 2, err
        assert (await berth("halt", "--all"))[0] == 2  # a reason is needed
