"""The built-in brokers and the fake keep the contract that authors of other brokers run, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.berth_testing.harness import BrokerStage
from infra.berth_testing.sources import find_faults
from infra.berth_testing.suite import *  # noqa: F403 - its tests
from worker_runtime.brokers.port import Broker


def test_these_brokers_say_that_their_lists_leave_nothing_out(
    broker: Broker, stage: BrokerStage
) -> None:
    listing = broker.orders(5.0)
    assert listing.behind == 0
    assert listing.reaches > 0


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import tenacity\n", "imports tenacity"),
        ("from urllib3.util.retry import Retry\n", "imports urllib3.util.retry"),
        ("httpx.HTTPTransport(retries=3)\n", "sets retries"),
        ("requests.post(url, json=order)\n", "calls requests.post without `timeout`"),
        (
            "import socket\nsocket.create_connection(address)\n",
            "source.py:2 calls socket.create_connection",
        ),
    ],
)
def test_a_source_that_could_submit_twice_is_found(tmp_path: Path, source: str, fault: str) -> None:
    path = tmp_path / "source.py"
    path.write_text(source)
    [message] = find_faults([tmp_path])
    assert fault in message


def test_a_source_with_timeouts_and_without_retries_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text("httpx.HTTPTransport(retries=0)\nrequests.post(url, timeout=3)\n")
    assert find_faults([path]) == []
