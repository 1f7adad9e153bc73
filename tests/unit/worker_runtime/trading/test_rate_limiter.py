"""What the refusal of a call says when it was not the broker's limit that forbade it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Argument, Valkey, ValkeyRefused
from worker_runtime.protocol.errors import LoginLimited, RateLimited
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import Credentials
from worker_runtime.protocol.scripts import Script
from worker_runtime.trading.account_session import OpenedAccount
from worker_runtime.trading.rate_limiter import CallKind, CountUnavailable
from worker_runtime.trading.shared_rate_limiter import SharedRateLimiter


def test_a_call_that_cannot_be_counted_is_refused_because_valkey_is_away(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody"
    config = WorkerConfig(
        worker_id="w", pool="p", valkey_url=url, launch_token=b"", orchestrator_key=b"secret"
    )
    budget = SharedRateLimiter(Valkey(url), config, SharedState(), Log("CRITICAL"))
    account = OpenedAccount(
        ConnectionKey("paper", "stock", True, "a1"), 1, Credentials(api_key="k", secret_key="s")
    )
    with pytest.raises(
        CountUnavailable, match=r"Valkey, .* could not be asked; .* Nothing was sent"
    ) as refused:
        budget.spend(account, CallKind.ORDER, lambda: 10.0)
    assert refused.value.retry_after == 1.0
    assert not budget.granted
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
        worker_id="w", pool="p", valkey_url=url, launch_token=b"", orchestrator_key=b"secret"
    )
    budget = SharedRateLimiter(Refusing(url), config, SharedState(), Log("CRITICAL"))
    account = OpenedAccount(
        ConnectionKey("paper", "stock", True, "a1"), 1, Credentials(api_key="k", secret_key="s")
    )
    with pytest.raises(RateLimited) as refused:
        budget.spend(account, CallKind.ORDER, lambda: 10.0)
    assert type(refused.value) is kind
