"""Starts the whole system once for this folder; tests kill parts of it and bring them back."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.process import free_ports
from infra.local.stack import LocalStack
from tests.support.systems.local import POOL, VERIFY, RunningSystem, run_system


@pytest.fixture(scope="package")
def running_system() -> Iterator[RunningSystem]:
    """Ends with the tests of this folder: left running it would take its share of the machine from
    all later ones, and hundreds of processes would be looked through whenever one is sought."""
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_CORE)
    # As where somebody hunts a crash.
    resource.setrlimit(resource.RLIMIT_CORE, (hard_limit, hard_limit))
    try:
        metrics, _ = free_ports(2)  # the second is the one after it, for the SDK's
        address = f"127.0.0.1:{metrics}"
        with run_system(
            lambda folder: LocalStack(
                folder,
                pool_target=POOL,
                connect_timeout=5.0,
                metrics_address=address,
                entity_period=2.0,
                live_accounts=True,  # no test has keys of a real broker
                **VERIFY,
            )
        ) as system:
            yield system
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (limit, hard_limit))


@pytest.fixture
def system(running_system: RunningSystem) -> RunningSystem:
    """The running system with a full pool, whatever the test before did to it."""
    running_system.restore()
    return running_system


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of this folder pays for the start of the whole system. A mark that a fixture
    made would come too late: the limit counts from before the first fixture."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(240))
