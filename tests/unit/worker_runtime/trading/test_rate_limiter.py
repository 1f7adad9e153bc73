"""A refused call says what forbade it, also when it was not the broker's limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Argument, Valkey, ValkeyRefused
from worker_runtime.protocol.errors import LoginLimited, RateLimited
from worker_runtime.protocol.launch import Allowance, WorkerConfig
from worker_runtime.protocol.messages import Credentials
from worker_runtime.protocol.scripts import Script
from worker_runtime.trading.account_session import OpenedAccount
from worker_runtime.trading.rate_limiter import (
    GRANT_LIFETIME_S,
    CallKind,
    CountUnavailable,
    SharedRateLimiter,
)


def test_a_call_that_cannot_be_counted_is_refused_because_valkey_is_away(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody"
    config = WorkerConfig(
        worker_id="w",
        pool="p",
        valkey_url=url,
        launch_token=b"",
        orchestrator_keys=(),
    )
    budget = SharedRateLimiter(Valkey(url), config, SharedState(), Log("CRITICAL"))
    account = OpenedAccount(
        ConnectionKey("paper", "stock", True, "a1"),
        1,
        Credentials(api_key="k", secret_key="s"),
        ["b"],
    )
    with pytest.raises(
        CountUnavailable, match=r"Valkey, .* could not be asked\. Nothing was sent\. Retry"
    ) as refused:
        budget.spend(account, CallKind.ORDER, lambda: 10.0)
    assert refused.value.retry_after == 1.0
    assert not budget.grant_is_fresh()
    with pytest.raises(LoginLimited):
        budget.spend(account, CallKind.LOGIN, lambda: 10.0)


@pytest.mark.parametrize(("reply", "kind"), [("LOADING", CountUnavailable), ("OOM", RateLimited)])
def test_a_server_that_reads_its_data_in_is_away_and_one_that_refuses_the_count_is_not(
    reply: str, kind: type[RateLimited]
) -> None:
    class Refusing(Valkey):
        def run(self, script: Script, key_names: Sequence[str], args: Sequence[Argument]) -> Any:
            raise ValkeyRefused(reply)

    url = "redis://127.0.0.1:1/0"
    config = WorkerConfig(
        worker_id="w",
        pool="p",
        valkey_url=url,
        launch_token=b"",
        orchestrator_keys=(),
    )
    budget = SharedRateLimiter(Refusing(url), config, SharedState(), Log("CRITICAL"))
    account = OpenedAccount(
        ConnectionKey("paper", "stock", True, "a1"),
        1,
        Credentials(api_key="k", secret_key="s"),
        ["b"],
    )
    with pytest.raises(RateLimited) as refused:
        budget.spend(account, CallKind.ORDER, lambda: 10.0)
    assert type(refused.value) is kind


class GrantingValkey(Valkey):
    """Grants what it is asked, and keeps the ids of the calls. `delay`: seconds until it
    answers."""

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__("redis://127.0.0.1:1/0")
        self.calls: list[Argument] = []
        #: Names of the keys, with the arguments.
        self.asked: list[tuple[str, list[Argument]]] = []
        self.delay = delay

    def run(self, script: Script, key_names: Sequence[str], args: Sequence[Argument]) -> Any:
        self.calls.append(args[0])
        self.asked.append((key_names[0], list(args)))
        asked = time.monotonic()
        while time.monotonic() - asked < self.delay:
            time.sleep(0.01)
        return [1, 0, b"count"]


def spend_orders(
    client: GrantingValkey, count: int, egress: tuple[str, ...] = ()
) -> SharedRateLimiter:
    """Returns a rate limiter that has granted this many orders."""
    config = WorkerConfig(
        worker_id="w",
        pool="p",
        valkey_url="",
        launch_token=b"",
        orchestrator_keys=(),
        allowance=Allowance(egress=egress),
    )
    limiter = SharedRateLimiter(client, config, SharedState(), Log("CRITICAL"))
    account = OpenedAccount(
        ConnectionKey("paper", "stock", True, "a1"),
        1,
        Credentials(api_key="k", secret_key="s"),
        ["b"],
    )
    for _ in range(count):
        limiter.spend(account, CallKind.ORDER, lambda: 1.0)
    return limiter


def test_a_grant_is_void_after_its_lifetime() -> None:
    limiter = spend_orders(GrantingValkey(), 1)
    assert limiter.grant_is_fresh()
    granted = time.monotonic()
    while time.monotonic() - granted < GRANT_LIFETIME_S:
        time.sleep(0.01)
    assert not limiter.grant_is_fresh()


def test_a_grant_whose_reply_took_too_long_is_void() -> None:
    assert not spend_orders(GrantingValkey(GRANT_LIFETIME_S), 1).grant_is_fresh()


def test_no_two_calls_share_an_id() -> None:
    client = GrantingValkey()
    spend_orders(client, 3)
    assert len(set(client.calls)) == 3


def test_an_order_is_asked_for_once_for_the_person_and_once_for_the_address() -> None:
    client = GrantingValkey()
    spend_orders(client, 1, egress=("address",))
    assert len(client.calls) == 2


def behind_address(
    client: GrantingValkey, **shares: int
) -> tuple[SharedRateLimiter, OpenedAccount]:
    """A limiter, and an account that counts for a person and for its user's share of an address."""
    config = WorkerConfig(
        worker_id="w", pool="p", valkey_url="", launch_token=b"", orchestrator_keys=()
    )
    account = OpenedAccount(
        ConnectionKey("paper", "stock", True, "a1"),
        1,
        Credentials(api_key="k", secret_key="s"),
        ["person"],
        address_budgets=["address"],
        address_share=2000,
        address_shares=shares,
    )
    return SharedRateLimiter(client, config, SharedState(), Log("CRITICAL")), account


def test_a_share_of_an_address_has_a_size_of_its_own_for_each_kind_of_call() -> None:
    client = GrantingValkey()
    limiter, account = behind_address(client, orders=500)
    limiter.spend(account, CallKind.QUERY, lambda: 1.0)
    (_, of_person), (_, of_address) = client.asked
    # Of 25 queries and 250 orders nine tenths: the address takes two persons' queries, and half a
    # person's orders.
    assert [of_person[index] for index in (6, 10)] == [22, 225]
    assert [of_address[index] for index in (6, 10)] == [45, 112]


@pytest.mark.parametrize(
    ("shares", "asked"),
    [
        ({"orders": 500}, [("person", 5)]),
        ({"connections": 400}, [("person", 5), ("address", 2)]),
        ({"connections": 100}, [("person", 5), ("address", 1)]),
    ],
)
def test_connections_are_counted_by_address_where_the_broker_limits_them(
    shares: dict[str, int], asked: list[tuple[str, int]]
) -> None:
    client = GrantingValkey()
    limiter, account = behind_address(client, **shares)
    limiter.connect(account, lambda: 1.0)
    connections = [
        (name.split(":")[2].strip("{}"), args[3])
        for name, args in client.asked
        if args[0] == f"{SharedState().user_id}/a1/1"
    ]
    assert connections == asked
