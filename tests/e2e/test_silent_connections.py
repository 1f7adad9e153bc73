"""All connections of the whole system to one server die without a word; orders go on within two
seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from infra.local.stack import DATABASE, LocalStack
from tests.support.proxies.silent import SilentProxy
from tests.support.systems.local import RunningSystem, Trader, run_system

USERS = 20
#: Seconds that an order may take after a drop, and that a machine under load may add.
AFTER_A_DROP_S, LOAD_S = 2.0, 3.0

pytestmark = [pytest.mark.drill, pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class ProxiedSystem:
    system: RunningSystem
    proxies: dict[str, SilentProxy]
    traders: list[Trader]

    def order_all(self) -> list[tuple[httpx.Response, float]]:
        """One order of each user, all at once, and the seconds that each took."""

        def order(trader: Trader) -> tuple[httpx.Response, float]:
            began = time.monotonic()
            answer = self.system.order(trader)
            return answer, time.monotonic() - began

        with ThreadPoolExecutor(max_workers=USERS) as threads:
            return list(threads.map(order, self.traders))


@pytest.fixture(scope="module")
def proxied() -> Iterator[ProxiedSystem]:
    with ExitStack() as stack:
        names = ("postgres", "valkey", "worker-valkey", "temporal")
        proxies = {name: stack.enter_context(SilentProxy()) for name in names}

        def through_proxies(folder: Path) -> LocalStack:
            made = LocalStack(
                folder,
                pool_target=2,
                check_duplicate_window=0.0,
                valkey_url=f"redis://{proxies['valkey'].address}/0",
                worker_valkey_url=f"redis://{proxies['worker-valkey'].address}/0",
                database_url=f"postgresql+asyncpg://berth@{proxies['postgres'].address}/{DATABASE}",
                temporal_address=proxies["temporal"].address,
            )
            proxies["valkey"].target = proxies["worker-valkey"].target = made.valkey.port
            proxies["postgres"].target = made.postgres.port
            proxies["temporal"].target = made.temporal.port
            return made

        system = stack.enter_context(run_system(through_proxies))
        traders = [system.trader() for _ in range(USERS)]
        with ThreadPoolExecutor(max_workers=4) as threads:
            list(threads.map(system.start_until_active, traders))
        yield ProxiedSystem(system, proxies, traders)


@pytest.mark.parametrize("idle", [2.0, 0.0], ids=["idle", "in-use"])
@pytest.mark.parametrize("server", ["postgres", "valkey", "worker-valkey"])
def test_orders_after_all_connections_to_a_server_died(
    proxied: ProxiedSystem, server: str, idle: float
) -> None:
    for answer, _ in proxied.order_all():
        assert answer.status_code == 201, answer.text
    threading.Event().wait(idle)
    assert proxied.proxies[server].silence() > 0

    answered = proxied.order_all()

    slowest = max(seconds for _, seconds in answered)
    print(f"{server}, {idle} s idle: slowest of {USERS}: {slowest:.2f} s")  # noqa: T201 - to be reported
    assert {answer.status_code for answer, _ in answered} == {201}, [
        answer.text for answer, _ in answered
    ]
    assert slowest < AFTER_A_DROP_S + LOAD_S
    for trader, (answer, _) in zip(proxied.traders, answered, strict=True):
        sent = [order.client_note for order in proxied.system.ledger(trader)]
        assert sent.count(answer.json()["id"]) == 1
        assert len(sent) == len(set(sent))  # submit-once
