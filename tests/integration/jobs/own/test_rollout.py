"""Another version of a package takes over while jobs run: none is lost, none runs twice."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.servers import ValkeyServer
from tests.support.jobs.application import Application

JOBS = 60


@pytest.fixture
def rolled(valkey_server: ValkeyServer, manifest: bytes) -> Iterator[Application]:
    """An application with one runner of four slots."""
    with tempfile.TemporaryDirectory(prefix="berth-shop-") as folder:
        application = Application(valkey_server.url, Path(folder))
        application.load_types(manifest)
        application.start("old", slots=4)
        yield application
        application.close()


def test_runners_are_replaced_while_jobs_run_and_each_job_runs_once(rolled: Application) -> None:
    gate = rolled.path("gate")
    first = [rolled.add("spend", ledger=rolled.path("ledger"), until=gate) for _ in range(4)]
    rolled.started("ledger", 4)  # all slots of the old runner are taken
    rest = [rolled.add("spend", ledger=rolled.path("ledger")) for _ in range(JOBS)]
    [old] = rolled.runners
    old.send(signal.SIGTERM)
    rolled.start("new", slots=4)
    for job_id in rest:
        assert rolled.result(job_id).failure is None
    rolled.open("gate")  # the old runner ends what it runs, and then itself
    for job_id in first:
        assert rolled.result(job_id).failure is None
    assert old.wait() == 0
    assert sorted(rolled.lines("ledger")) == sorted(first + rest)
