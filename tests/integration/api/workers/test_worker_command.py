"""`berth worker …` as a process, against a real API."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from infra.database.workers import timeline
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, operator, served
from tests.support.waiting import until
from tests.support.workflows.user_worker_stub import LifecycleStub
from workflows.user_worker.messages import ReloadResult, Transition

BERTH = str(Path(sys.executable).with_name("berth"))


async def started(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        BERTH,
        "worker",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "NO_COLOR": "1"},
    )


@pytest.fixture
def key_file(whole_api: ServedApi, tmp_path: Path) -> Path:
    path = tmp_path / "admin.key"
    path.touch(mode=0o600)
    path.write_text(whole_api.admin_key)
    return path


async def test_an_operator_sees_and_steers_a_worker(
    whole_api: ServedApi, lifecycle: LifecycleStub, commands: CommandForker, tmp_path: Path
) -> None:
    api, user = whole_api, whole_api.user
    async with operator(api, commands, tmp_path) as berth:
        nobody = await berth("worker", "stop", user)
        assert nobody == (1, "", "error: NO_WORKER: The user has no running worker.\n")
        assert await berth("worker", "start", user) == (
            0,
            f"{user} is Active with worker scripted, epoch 1\n",
            "",
        )
        code, out, _ = await berth("worker", "show", user)
        assert code == 0
        assert "2 in the last minutes" in out
        code, out, _ = await berth("worker", "show", user, "--json")
        assert json.loads(out)["lifecycle"]["crashes"] == 2
        while not json.loads((await berth("worker", "list", "--user", user, "--json"))[1]):
            pass  # the index is a moment behind
        code, out, _ = await berth("worker", "list", "--user", user)
        assert out.splitlines()[1].split()[:4] == [user, "Active", "scripted", "default"]
        code, _, err = await berth("worker", "list", "--state", "active")
        assert code == 1
        assert "'Reconnecting'" in err

        assert await berth("worker", "reload-credentials", user) == (0, f"{user}: reloaded\n", "")
        lifecycle.reload = ReloadResult(
            ok=False, failure_code="LOGIN_REJECTED", failure_detail="wrong key"
        )
        code, _, err = await berth("worker", "reload-credentials", user)
        refused = "error: LOGIN_REJECTED: wrong key; the worker keeps the session it had\n"
        assert (code, err) == (1, refused)
        assert (await berth("worker", "resume", user, "--reason", "repaired"))[0] == 0
        assert (await berth("worker", "stop", user, "--reason", "done"))[0] == 0
        # The command does not wait for its workflow.
        await until(lambda: len(lifecycle.signals) == 2)
    assert lifecycle.signals == [("resume", ""), ("shutdown", "done")]


async def test_a_timeline_is_listed_and_followed(whole_api: ServedApi, key_file: Path) -> None:
    api = whole_api

    async def note(number: int, before: str, after: str) -> None:
        row = asdict(
            Transition(
                number=number, at=1_800_000_000.0, before=before, after=after, reason="because"
            )
        )
        async with api.services.database.session() as session:
            await timeline.record_transitions(
                session, user_id=api.user, chain="chain", transitions=[row]
            )

    await note(0, "PoolIdle", "Claimed")
    async with served(api) as url:
        where = ("--url", url.removesuffix("/v1"), "--key-file", str(key_file))
        process = await started("timeline", api.user, *where)
        out, _ = await process.communicate()
        assert out.decode().splitlines()[1].split()[1:5] == [
            "2027-01-15",
            "08:00:00",
            "PoolIdle",
            "Claimed",
        ]

        process = await started("timeline", api.user, "--follow", "--json", *where)
        assert process.stdout is not None
        first = json.loads(await process.stdout.readline())
        await note(1, "Claimed", "Active")
        second = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        assert [(row["before"], row["after"]) for row in (first, second)] == [
            ("PoolIdle", "Claimed"),
            ("Claimed", "Active"),
        ]
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        assert (process.returncode, err) == (130, b"")
