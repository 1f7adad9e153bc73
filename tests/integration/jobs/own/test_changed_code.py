"""A package is replaced by another version of it: what its runners do, and which limits count."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.servers import ValkeyServer
from tests.support.jobs.application import NAME, PACKAGES, TAG, Application
from tests.support.waiting import eventually
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys

LIMIT = job_calls.limit_field(f"{NAME}/shop_jobs.alone")


class ChangingPackage:
    """An application whose package the test changes."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self.packages = Path(shutil.copytree(PACKAGES, application.folder / "packages"))

    def start(self, name: str) -> None:
        """Starts a runner; its types and their limits are announced when this returns."""
        runner = self.application.start(name, packages=str(self.packages))
        eventually(lambda: runner.logged("job_runner_registered"), "announced types")

    def stop(self) -> None:
        runner = self.application.runners.pop()
        runner.send(signal.SIGTERM)
        assert runner.wait() == 0

    def declare_limit(self, limit: int) -> None:
        """Has the next version of the package declare that this many jobs of `alone` may run."""
        module = self.packages / "shop_jobs.py"
        text, changes = re.subn(
            r"@job\(max_running=\d+, idempotent=True\)",
            f"@job(max_running={limit}, idempotent=True)",
            module.read_text(),
        )
        assert changes == 1
        module.write_text(text)

    def limit(self) -> int:
        value = self.application.client.execute("HGET", job_keys.meta(TAG), LIMIT)
        return 0 if value is None else int(value)


@pytest.fixture
def deployment(valkey_server: ValkeyServer, manifest: bytes) -> Iterator[ChangingPackage]:
    with tempfile.TemporaryDirectory(prefix="berth-shop-") as folder:
        application = Application(valkey_server.url, Path(folder))
        application.load_types(manifest)
        yield ChangingPackage(application)
        application.close()


def test_a_runner_whose_code_was_replaced_ends_once_its_jobs_have(
    deployment: ChangingPackage,
) -> None:
    shop = deployment.application
    deployment.start("old")
    [runner] = shop.runners
    deployment.declare_limit(7)
    gate = shop.path("gate")
    killed = shop.add("survive", ledger=shop.path("ledger"), until=gate)
    shop.started("ledger")
    # The fork server that replaces the killed one imports another manifest.
    os.kill(shop.fork_server(runner), signal.SIGKILL)
    eventually(lambda: runner.logged("job_types_changed"), "a runner that has noticed")
    assert runner.wait() == 0
    deployment.start("new")
    shop.open("gate")
    assert shop.value(killed) == 2
    assert deployment.limit() == 7


def test_a_limit_follows_its_declaration_until_an_operator_sets_it(
    deployment: ChangingPackage,
) -> None:
    shop = deployment.application
    deployment.start("first")
    assert deployment.limit() == 1
    deployment.stop()
    deployment.declare_limit(3)
    deployment.start("second")
    assert deployment.limit() == 3
    shop.client.run(*job_calls.configure({LIMIT: "2"}, TAG))
    deployment.stop()
    deployment.declare_limit(4)
    deployment.start("third")
    assert deployment.limit() == 2
    gate = shop.path("gate")
    jobs = [shop.add("alone", ledger=shop.path("ledger"), until=gate) for _ in range(5)]
    states = eventually(
        lambda: (
            seen
            if "running" in (seen := sorted(str(shop.field(job_id, "state")) for job_id in jobs))
            and len(shop.lines("ledger")) == 2
            else []
        ),
        "two running jobs",
    )
    assert states == ["running"] * 2 + ["waiting"] * 3
    shop.open("gate")
    for job_id in jobs:
        shop.value(job_id)
