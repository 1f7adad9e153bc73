"""`berth jobs …` on a real queue with a real runner."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.cli.app import app
from infra.database import audit
from infra.database.engine import Database
from tests.support.jobs.runners import RunnerFleet
from tests.support.jobs.scripted_program import JobScript
from tests.support.message_signing import write_secret
from tests.support.waiting import eventually
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import JobStatus

BERTH = str(Path(sys.executable).with_name("berth"))


class Cli:
    """The commands, against one Valkey."""

    def __init__(self, url: str, folder: Path, database_url: str = "") -> None:
        write_secret(folder / "message.key")
        self.environment = {
            "BERTH_VALKEY_URL": url,
            "BERTH_MESSAGE_KEY_FILE": str(folder / "message.key"),
        }
        self.database_url = database_url
        if database_url:
            self.environment["BERTH_DATABASE_URL"] = database_url
        self._environment = {**self.environment, "NO_COLOR": "1", "COLUMNS": "200"}

    def text(self, *words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["jobs", *words], env=self._environment)
        assert done.exit_code == code, done.output
        return done.output

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.text(*words, "--json", code=code))


def test_an_empty_name_does_not_mean_the_fleet(cli: Cli) -> None:
    for words in (["suspend"], ["requeue", "--all"], ["worker"]):
        assert "the name is empty" in cli.text(*words, "--user", "", code=2)


@contextmanager
def running(words: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """The command as a process. A test that fails does not wait for its end."""
    # What a shell runs in the background ignores SIGINT, and so does all that it starts. These
    # tests may be that.
    with subprocess.Popen(["/usr/bin/env", "--default-signal=INT", *words], **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def cli(fleet: RunnerFleet, tmp_path: Path, migrated_database: str) -> Cli:
    return Cli(fleet.harness.url, tmp_path, migrated_database)


def test_queues_runners_and_running_jobs_are_shown(fleet: RunnerFleet, cli: Cli) -> None:
    fleet.start("one")
    fleet.add("busy", script=JobScript(until=fleet.gate(), progress=40))
    fleet.started("busy")
    fleet.add("next", queue="exports")
    fleet.add("later", delay=60)
    eventually(lambda: cli.json("running")[0]["progress"] == 40, "the progress")
    overview = cli.json("info")
    assert [(queue["queue"], queue["types"]) for queue in overview["queues"]] == [
        ("exports", {"scripted": 1})
    ]
    assert (overview["delayed"], overview["failed"], overview["suspended"]) == (1, 0, False)
    (runner,) = cli.json("workers")
    assert (runner["name"], runner["state"], runner["jobs"]) == ("one", "busy", ["busy"])
    table = cli.text("info", "-W")
    assert "1 waiting, 1 running, 1 delayed, 0 failed; 1 runners" in table
    assert re.search(r"one-\w+ +local +\d+ +\* +busy +busy", table)
    assert re.search(r"exports +1 +\d+\.\d s +1 +1 +open +scripted 1", cli.text("queues"))
    assert "exports" not in cli.text("info", "--user", "somebody")


def test_a_failed_job_is_shown_with_its_traceback_and_requeued(
    fleet: RunnerFleet, cli: Cli
) -> None:
    fleet.start()
    fleet.add("bad", script=JobScript(fails="no such account", prints="half way"))
    fleet.result("bad")
    (row,) = cli.json("failed")
    assert (row["job_id"], row["code"], row["attempt"]) == ("bad", "JOB_FAILED", 1)
    assert re.search(
        r"bad +scripted +default +1 .+ JOB_FAILED +RuntimeError: no such account",
        cli.text("failed"),
    )
    shown = cli.text("show", "bad")
    assert "Traceback (most recent call last)" in shown
    assert "half way" in shown
    assert cli.text("requeue", "bad") == "1 of 1 requeued\n"
    eventually(lambda: len(fleet.ledger("bad")) == 2, "a second run")
    fleet.result("bad")
    assert cli.json("requeue", "bad", "other", code=1) == {"requeued": ["bad"], "left": ["other"]}


def test_failed_jobs_are_requeued_by_filter_and_all(fleet: RunnerFleet, cli: Cli) -> None:
    fleet.start()
    for number in range(3):
        fleet.add(f"a{number}", script=JobScript(fails="x"), queue="first")
        fleet.add(f"b{number}", script=JobScript(fails="x"), queue="second")
    for job_id in ("a0", "a1", "a2", "b0", "b1", "b2"):
        fleet.result(job_id)
    cli.text("suspend")
    assert len(cli.json("failed", "--limit", "4")) == 4
    assert cli.text("requeue", "--queue", "first") == "3 of 3 requeued\n"
    assert {job["job_id"] for job in cli.json("failed")} == {"b0", "b1", "b2"}
    assert cli.text("requeue", "--code", "JOB_TIMEOUT") == "0 of 0 requeued\n"
    assert cli.text("requeue", "--all") == "3 of 3 requeued\n"
    assert cli.json("failed") == []
    cli.text("requeue", code=2)
    cli.text("requeue", "--all", "--queue", "first", code=2)


def test_everything_a_queue_or_a_runner_is_suspended_and_resumed(
    fleet: RunnerFleet, cli: Cli, tmp_path: Path
) -> None:
    fleet.start("one")
    assert cli.text("suspend", "--queue", "default") == "queue default is suspended\n"
    assert cli.text("suspend", "--queue", "default") == "queue default is suspended already\n"
    fleet.add("held")
    fleet.add("free", queue="other")
    fleet.result("free")
    assert re.search(r"default +1 +0\.0 s +1 +1 +suspended", cli.text("queues"))
    assert cli.text("suspend", "--runner", "one") == "runner one is suspended\n"
    assert cli.json("workers")[0]["suspended"]
    assert cli.text("suspend") == "everything is suspended\n"
    assert "all queues are suspended" in cli.text("info")
    for words in (["--queue", "default"], ["--runner", "one"]):
        cli.text("resume", *words)
    assert fleet.ledger("held") == []
    assert cli.text("resume") == "everything is open\n"
    assert fleet.result("held").status == JobStatus.DONE
    cli.text("suspend", "--queue", "default", "--runner", "one", code=2)
    by = f"{getpass.getuser()} at {socket.gethostname()}"
    assert audited(cli)[:2] == [
        (by, "jobs.suspend_requested", {"queue": "default"}),
        (by, "jobs.suspend_requested", {"queue": "default"}),
    ]
    refused = Cli(fleet.harness.url, tmp_path, "postgresql+asyncpg://berth@127.0.0.1:1/berth").text(
        "suspend", code=1
    )
    assert "not done, since the audit trail cannot be written" in refused
    assert cli.json("info")["suspended"] is False


def audited(cli: Cli) -> list[tuple[str, str, dict[str, Any]]]:
    """What operators did, the first act first."""

    async def read() -> list[tuple[str, str, dict[str, Any]]]:
        database = Database(cli.database_url, pool_size=1)
        async with database.session() as session:
            rows = await audit.list_entries(session, limit=100)
        await database.close()
        return [(row.actor, row.action, row.data) for row in reversed(rows)]

    return asyncio.run(read())


def test_what_nobody_knows_is_neither_suspended_nor_resumed(fleet: RunnerFleet, cli: Cli) -> None:
    fleet.start("one")
    for verb in ("suspend", "resume"):
        unknown = cli.text(verb, "--runner", "typo", code=1)
        assert unknown == "error: there is no runner typo; known: one\n"
        refused = cli.text(verb, "--queue", "typo", code=1)
        assert "no queue typo; known: default, email, push, sms, webhook, whatsapp" in refused
    assert "suspended" not in cli.text("info", "-W")
    cli.text("suspend", "--runner", "one")
    assert cli.text("resume", "--runner", "one") == "runner one is open\n"
    assert cli.text("resume", "--runner", "one") == "runner one is open already\n"


def test_the_address_comes_from_a_secret_file_as_everywhere(
    fleet: RunnerFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "berth_valkey_url").write_text(fleet.harness.url)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("BERTH_")
    }
    environment |= {"BERTH_SECRETS_DIR": str(tmp_path), "BERTH_DATA_DIR": str(tmp_path / "none")}
    done = subprocess.run(
        [BERTH, "jobs", "info"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "0 waiting" in done.stdout


def test_waiting_and_running_jobs_are_cancelled(fleet: RunnerFleet, cli: Cli) -> None:
    fleet.start()
    fleet.add("running", script=JobScript(until=fleet.gate()))
    fleet.started("running")
    fleet.add("waiting")
    assert cli.json("cancel", "waiting") == {"job_id": "waiting", "became": "cancelled"}
    assert cli.text("cancel", "running") == "its runner was asked to end it\n"
    assert fleet.result("running").status == JobStatus.CANCELLED
    assert cli.json("show", "running")["state"] == "cancelled"
    cli.text("cancel", "nobody", code=1)
    cli.text("show", "nobody", code=1)


def test_a_watch_shows_it_again_and_again_until_it_is_interrupted(fleet: RunnerFleet) -> None:
    words = [BERTH, "jobs", "info", "--watch", "--json", "--valkey", fleet.harness.url]
    with running(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        overviews = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert [overview["failed"] for overview in overviews] == [0, 0]


def test_a_runner_of_the_fleet_is_started_from_the_command_line(
    fleet: RunnerFleet, cli: Cli, tmp_path: Path
) -> None:
    words = [
        BERTH,
        "jobs",
        "worker",
        "--queues",
        "a,b",
        "--name",
        "mine",
        "--valkey",
        fleet.harness.url,
    ]
    config = tmp_path / "runner.json"
    config.write_text('{"version": "told"}')
    config.chmod(0o600)
    words += ["--config", str(config)]
    with running(words, stderr=subprocess.PIPE, env=os.environ | cli.environment) as process:
        (runner,) = eventually(fleet.beats, "a registered runner")
        own = job_keys.runner(job_keys.FLEET_TAG, runner)
        entry = fleet.harness.client.execute("HMGET", own, "queues", "version")
        fleet.harness.enqueue("j", "ping", queue="b")
        result = fleet.result("j")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert (entry, result.status) == ([b"a,b", b"told"], JobStatus.DONE)
    assert runner.startswith("mine-")


@pytest.mark.parametrize(
    ("mode", "text", "told"),
    [
        (0o644, "{}", "mode 0644; it must be 0600"),
        (0o600, json.dumps({"version": "x" * 70_000}), "at most 64 KiB"),
        (0o600, "[]", "a JSON object is needed"),
        (0o600, "{", "Expecting"),
    ],
)
def test_a_configuration_that_others_can_read_or_that_is_invalid_is_refused(
    tmp_path: Path, mode: int, text: str, told: str
) -> None:
    config = tmp_path / "c"
    config.write_text(text)
    config.chmod(mode)
    output = Cli("redis://127.0.0.1:1/0", tmp_path).text("worker", "--config", str(config), code=2)
    assert told in " ".join(output.replace("│", " ").split())  # wrapped in a box


def test_an_unreachable_valkey_is_one_sentence() -> None:
    done = CliRunner().invoke(
        app, ["jobs", "info"], env={"BERTH_VALKEY_URL": "redis://127.0.0.1:1/0"}
    )
    assert done.exit_code == 1
    assert done.output.startswith("error: Valkey cannot be reached.")
