"""The whole system with short times, its workers behind a proxy, for tests that break workers in
all ways."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.local.stack import LocalStack
from tests.e2e.conftest import House, Trader, house_of
from tests.support.proxies.worker_lines import WorkerLines

POOL = 6
#: Seconds; 5 of them are the lease's margin, and 5 bear a machine that stands still for a moment.
MARK_TTL = 10.0
WATCH_CONFIRM = 1.0
#: Seconds; a healthy session is not replaced because the machine stood still for a moment: tests
#: compare the processes of workers before and after.
PULSE_TIMEOUT = 8.0
#: Users with a worker to whom nothing happens. They are many, because no missing mark is reported
#: while a fifth of all is missing (no-healthy-kill).
BYSTANDERS = 18


@dataclass(frozen=True)
class ChaosHouse:
    house: House
    lines: WorkerLines
    bystanders: tuple[Trader, ...]


@pytest.fixture(scope="package")
def chaos_house() -> Iterator[ChaosHouse]:
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
                watch_period=0.5,
                watch_confirm=WATCH_CONFIRM,
                pulse_timeout=PULSE_TIMEOUT,
                worker_valkey_url=lines.url,
            )
            lines.target = stack.valkey.port
            return stack

        with house_of(lined) as house:
            bystanders = tuple(house.trader() for _ in range(BYSTANDERS))
            with ThreadPoolExecutor(max_workers=6) as threads:
                list(threads.map(house.start_until_active, bystanders))
            house.stack.wait_pool(POOL)
            yield ChaosHouse(house, lines, bystanders)
