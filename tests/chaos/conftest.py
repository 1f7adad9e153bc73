"""Starts the whole system with many users, for tests that break workers in all ways."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.local.stack import LocalStack
from tests.support.chaos.system import (
    BYSTANDERS,
    MARK_TTL,
    POOL,
    PULSE_TIMEOUT,
    ChaosSystem,
)
from tests.support.proxies.worker_lines import WorkerLines
from tests.support.systems.local import run_system


@pytest.fixture(scope="package")
def chaos_system() -> Iterator[ChaosSystem]:
    """Ends with the tests of this folder: two dozen workers that renew their marks twice a second
    are no neighbours for the rest of the suite."""
    with WorkerLines() as lines:

        def lined(folder: Path) -> LocalStack:
            stack = LocalStack(
                folder,
                pool_target=POOL,
                connect_timeout=5.0,
                mark_ttl=MARK_TTL,
                mark_period=0.5,
                pulse_timeout=PULSE_TIMEOUT,
                worker_valkey_url=lines.url,
            )
            lines.target = stack.valkey.port
            return stack

        with run_system(lined) as system:
            bystanders = tuple(system.trader() for _ in range(BYSTANDERS))
            with ThreadPoolExecutor(max_workers=6) as threads:
                list(threads.map(system.start_until_active, bystanders))
            system.stack.wait_pool(POOL)
            yield ChaosSystem(system, lines, bystanders)
