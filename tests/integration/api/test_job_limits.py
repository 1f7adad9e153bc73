"""Limits of job types over the API and the command line, as the claim of a runner meets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select
from typer.testing import CliRunner

from infra.cli.app import app
from infra.database.models import AuditEntry
from infra.settings import Settings
from tests.support.commands import CommandForker
from tests.support.jobs.queue import QueueHarness, claim, ids
from tests.support.systems.api import ServedApi, operator
from worker_runtime.jobs.protocol import keys as job_keys

NONE = {"running": None, "per_node": None, "per_second": None, "burst": None}


@pytest.fixture
def harness(settings: Settings) -> Iterator[QueueHarness]:
    """A producer and runners on the API's Valkey."""
    harness = QueueHarness(settings.valkey_url)
    yield harness
    harness.close()


async def test_a_limit_holds_from_the_next_claim_and_wakes_who_waits_when_it_goes(
    api: ServedApi, harness: QueueHarness
) -> None:
    async with api.client(api.admin_key) as admin:
        body = {"running": 1, "reason": "the server asked for it"}
        answer = await admin.put("/job-limits/webhook", json=body)
        assert answer.json() == {"type": "webhook", "running_now": 0, **NONE, "running": 1}
        for number in range(3):
            harness.enqueue(f"w{number}", name="webhook", rate_key="example.com")
        runner = harness.runner()
        assert ids(claim(runner)) == ["w0"]
        assert claim(runner) == []
        [listed] = [
            limit
            for limit in (await admin.get("/job-limits")).json()["limits"]
            if limit["type"] == "webhook"
        ]
        assert (listed["running"], listed["running_now"]) == (1, 1)
        harness.client.execute("DEL", runner.mailbox())
        unknown = await admin.put("/job-limits/web-hook", json=body)
        assert unknown.status_code == 404
        assert unknown.json()["detail"].startswith("there is no job type web-hook; known: email, ")
        cleared = await admin.put("/job-limits/webhook", json={})
        assert cleared.json() == {"type": "webhook", "running_now": 1, **NONE}
        assert harness.client.execute("LRANGE", runner.mailbox(), 0, -1) == [b"check"]
        assert ids(claim(runner)) == ["w1"]
    async with api.services.database.session() as session:
        entries = await session.scalars(
            select(AuditEntry.data)
            .where(AuditEntry.subject == "job-type:webhook")
            .order_by(AuditEntry.id)
        )
        told = [(entry["running"], entry["reason"]) for entry in entries]
    assert told == [(1, "the server asked for it"), (None, "requested")]


async def test_a_rate_holds_for_each_key_with_its_burst(
    api: ServedApi, harness: QueueHarness
) -> None:
    async with api.client(api.admin_key) as admin:
        body = {"per_second": 0.001, "burst": 2}
        assert (await admin.put("/job-limits/webhook", json=body)).status_code == 200
        [listed] = [
            limit
            for limit in (await admin.get("/job-limits")).json()["limits"]
            if limit["type"] == "webhook"
        ]
        assert (listed["per_second"], listed["burst"]) == (0.001, 2)
    for number in range(3):
        harness.enqueue(f"a{number}", name="webhook", rate_key="a")
    harness.enqueue("b0", name="webhook", rate_key="b")
    runner = harness.runner()
    taken: list[str] = []
    while jobs := claim(runner):
        taken += ids(jobs)
    assert taken == ["a0", "a1", "b0"]
    assert harness.field("a2", "state") == "delayed"


async def test_wrong_limits_unknown_types_and_users_are_refused(api: ServedApi) -> None:
    async with api.client(api.admin_key) as admin, api.client(api.key) as user:
        for wrong in (
            {"running": -1},
            {"running": 1.5},
            {"per_second": 0},
            {"burst": 2},
            {"per_second": "NaN"},
            {"other": 1},
        ):
            answer = await admin.put("/job-limits/webhook", json=wrong)
            assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST"), wrong
        assert (await admin.put("/job-limits/no-such-type", json={})).status_code == 404
        assert (await user.put("/job-limits/webhook", json={})).json()["code"] == "FORBIDDEN"
        assert (await user.get("/job-limits")).json()["code"] == "FORBIDDEN"
        stored = await api.services.valkey.hgetall(job_keys.meta(job_keys.FLEET_TAG))
        assert not [name for name in stored if b"webhook" in name]


async def test_the_command_line_sets_lists_and_clears(
    api: ServedApi, commands: CommandForker, tmp_path: Path
) -> None:
    async with operator(api, commands, tmp_path) as berth:

        async def cli(*words: str, code: int = 0) -> str:
            done = await berth("jobs", "limits", *words)
            assert done.code == code, done
            return done.err if code else done.out

        made = await cli(
            "set", "email", "--running", "4", "--per-second", "2.5", "--burst", "5", "--json"
        )
        assert json.loads(made) == {
            "type": "email",
            "running_now": 0,
            "per_node": None,
            "running": 4,
            "per_second": 2.5,
            "burst": 5,
        }
        [line] = [line for line in (await cli("list")).splitlines() if line.startswith("email")]
        assert line.split() == ["email", "0", "4", "-", "2.5", "5"]
        cleared = (await cli("clear", "email", "--reason", "no need any more")).splitlines()[-1]
        assert cleared.split() == ["email", "0", "-", "-", "-", "-"]
        assert "NOT_FOUND" in await cli("set", "no-such-type", "--running", "1", code=1)


@pytest.mark.parametrize("words", [[], ["--burst", "2"], ["--running", "-1"]])
def test_the_command_line_wants_a_limit_that_makes_sense(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["jobs", "limits", "set", "email", *words])
    assert done.exit_code == 2, done.output
