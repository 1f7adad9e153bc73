"""`berth halt`, `reduce`, `open` and `switches` as processes, against a real API."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx

from tests.integration.api.conftest import ServedApi, an_order, served

BERTH = str(Path(sys.executable).with_name("berth"))


async def test_an_operator_halts_reduces_and_opens(
    api: ServedApi, user: httpx.AsyncClient, tmp_path: Path
) -> None:
    key_file = tmp_path / "admin.key"
    key_file.touch(mode=0o600)
    key_file.write_text(api.admin_key)
    async with served(api) as url:
        where = ("--url", url.removesuffix("/v1"), "--key-file", str(key_file))

        async def berth(*words: str) -> tuple[int, str, str]:
            process = await asyncio.create_subprocess_exec(
                *(BERTH, *words, *where),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"PATH": "/usr/bin:/bin", "NO_COLOR": "1"},
            )
            out, err = await process.communicate()
            return process.returncode or 0, out.decode(), err.decode()

        of_user = ("--user", api.user)
        assert await berth("halt", *of_user, "--reason", "a test") == (0, f"{api.user} is halted\n", "")
        refused = await user.post(f"/users/{api.user}/orders", json=an_order())
        assert refused.json()["code"] == "TRADING_HALTED"
        account = (*of_user, "--account", "main")
        assert (await berth("reduce", *account, "--reason", "a [b]test"))[
            1
        ] == f"{api.user} main is reducing\n"
        assert (await berth("open", *of_user, "--reason", "over"))[0] == 0
        assert (await berth("open", "--all", "--reason", "over"))[1] == "everybody is open\n"

        code, out, _ = await berth("switches", *of_user)
        lines = [line.split() for line in out.splitlines()]
        assert code == 0
        assert [line[:2] for line in lines[1:3]] == [["everybody", "open"], [api.user, "open"]]
        assert (lines[3][:3], lines[3][-2:]) == ([api.user, "main", "reducing"], ["a", "[b]test"])
        assert out.splitlines()[-1] == "in effect: all accounts open, main reducing"
        found = json.loads((await berth("switches", *of_user, "--json"))[1])
        assert found["effective"]["accounts"] == {"main": "reducing"}

        code, _, err = await berth("halt", "--user", "nobody", "--reason", "a test")
        assert (code, err) == (1, "error: USER_NOT_FOUND: there is no user nobody\n")
        for wrong in (["--all", *of_user], [], ["--all", "--account", "main"]):
            code, _, err = await berth("halt", *wrong, "--reason", "a test")
            assert code == 2, err
        assert (await berth("halt", "--all"))[0] == 2  # a reason is needed
