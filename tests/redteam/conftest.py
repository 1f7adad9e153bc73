"""Starts the whole system with attackers in it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.stack import LocalStack
from tests.integration.activities.conftest import harness
from tests.integration.api.conftest import api, settings, start_worker
from tests.support.systems.attacked import POOL, VALKEY_USERS, AttackedSystem

__all__ = ["api", "harness", "settings", "start_worker"]


@pytest.fixture(scope="package")
def running_system() -> Iterator[AttackedSystem]:
    folder = Path(tempfile.mkdtemp(prefix="berth-redteam-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user than root
    hook = folder / "hook"
    shutil.copytree(Path(__file__).parent / "hook", hook)
    (hook / "hostile").write_text("", encoding="utf-8")
    hook.chmod(0o777)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(hook))
            patch.setenv("BERTH_LOCAL_PASS_ENVIRONMENT", '["PYTHONPATH"]')
            with LocalStack(
                folder / "stack",
                pool_target=POOL,
                connect_timeout=5.0,
                valkey_users=VALKEY_USERS,
                egress_address="192.0.2.1",
                egress_persons=1000,
            ) as stack:
                system = AttackedSystem(stack, hook)
                yield system
                system.threads.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def system(running_system: AttackedSystem) -> AttackedSystem:
    """The running system with a full pool."""
    running_system.stack.wait_pool(POOL)
    return running_system


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test with the whole system pays for its start."""
    for item in items:
        if "system" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(240))
