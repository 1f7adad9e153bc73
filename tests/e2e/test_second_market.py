"""A broker of another distribution, with a market of its own, is traded next to the paper
exchange."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from infra.local.stack import LocalStack
from tests.support.brokers.example import install, write_example
from tests.support.systems.local import RunningSystem, Trader

pytestmark = [pytest.mark.drill, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def harbour_system() -> Iterator[tuple[RunningSystem, Any]]:
    """A stack with the page's broker installed, and the broker's market."""
    folder = Path(tempfile.mkdtemp(prefix="berth-markets-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user than root
    installed = folder / "installed"
    install(installed, write_example(folder))
    calendar = folder / "days.json"
    today = datetime.now(ZoneInfo("Europe/Lisbon")).date()
    calendar.write_text(
        json.dumps({"harbour/spot": {today.isoformat(): "00:00-23:59"}}), encoding="utf-8"
    )
    sys.path.insert(0, str(installed))
    try:
        exchange = importlib.import_module("berth_harbour.exchange")
        market = exchange.Harbour()
        server = exchange.serve(market)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(installed))
            patch.setenv("BERTH_LOCAL_PASS_ENVIRONMENT", '["PYTHONPATH"]')
            options = {"harbour": {"address": f"127.0.0.1:{server.server_address[1]}"}}
            with LocalStack(
                folder / "stack", pool_target=2, broker_options=options, calendar_file=str(calendar)
            ) as stack:
                stack.wait_pool(2)
                system = RunningSystem(stack)
                yield system, market
                system.threads.shutdown()
        server.shutdown()
        server.server_close()
    finally:
        sys.path.remove(str(installed))
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def both(harbour_system: tuple[RunningSystem, Any]) -> tuple[RunningSystem, Any, Trader]:
    """A user with an account at each broker, and a worker."""
    system, market = harbour_system
    trader = system.trader()
    account = f"hb-{trader.user_id}"
    market.keys[account] = ("k", "s")
    stored = system.call(
        "PUT",
        f"/v1/users/{trader.user_id}/accounts/{account}/credentials",
        trader.api_key,
        json={"broker": "harbour", "api_key": "k", "secret_key": "s"},
    )
    assert stored.is_success, stored.text
    assert stored.json()["broker_type"] == "spot"
    system.start_until_active(trader)
    return system, market, trader


def test_orders_at_both_brokers_keep_the_rules_of_their_own_market(
    both: tuple[RunningSystem, Any, Trader],
) -> None:
    system, market, trader = both
    account = f"hb-{trader.user_id}"
    market.set_price("ALFA.HB", Decimal("12.04"))

    def at_harbour(**changes: Any) -> tuple[int, dict[str, Any]]:
        answer = system.order(trader, account_id=account, **{"symbol": "ALFA.HB", **changes})
        return answer.status_code, answer.json()

    # Both are filled, each at its own price and in its own currency.
    status, order = at_harbour(quantity=3)
    assert (status, order["state"], order["average_price"]) == (201, "filled", "12.04"), order
    paper = system.order(trader)
    assert (paper.status_code, paper.json()["state"]) == (201, "filled"), paper.text
    assert [row["symbol"] for row in market.orders if row["account"] == account] == ["ALFA.HB"]
    balance = system.call(
        "GET", f"/v1/users/{trader.user_id}/accounts/{account}/balance", trader.api_key
    )
    assert balance.json()["currency"] == "EUR", balance.text

    # The records decide what each market takes: nothing of these reaches a broker.
    assert at_harbour(symbol="2330")[1]["code"] == "UNKNOWN_SYMBOL"
    assert (
        at_harbour(condition="margin", price_type="LMT", price="12")[1]["code"]
        == "ORDER_TERMS_RULE"
    )
    assert at_harbour(time_in_force="ROD")[1]["code"] == "PRICE_TYPE_RULE"
    assert at_harbour(quantity=201)[1]["code"] == "ORDER_TERMS_RULE"
    limit = system.call(
        "PUT",
        f"/v1/users/{trader.user_id}/accounts/{account}/limits",
        system.stack.admin_key,
        json={"max_notional": "1000"},
    )
    assert limit.is_success, limit.text

    def refused_for_its_value() -> str:
        # Ten units a lot: 12 lots at 12 are 1,440 EUR. The limit is in force within 5 s.
        _, body = at_harbour(quantity=12, price_type="LMT", price="12", time_in_force="IOC")
        return str(body.get("detail", ""))

    deadline = datetime.now().timestamp() + 20
    while "1440 EUR" not in (detail := refused_for_its_value()):
        assert datetime.now().timestamp() < deadline, detail
    # Its table of ticks is the broker's own: 12.03 is between two steps.
    _, order = at_harbour(quantity=1, price_type="LMT", price="12.03", time_in_force="IOC")
    assert "is no multiple of 0.02" in order["reason"], order


def test_the_workers_announce_their_brokers(both: tuple[RunningSystem, Any, Trader]) -> None:
    system, _, trader = both
    with system.valkey() as client:
        names = [
            name for name in client.scan_iter(f"*{trader.user_id}*") if client.type(name) == b"hash"
        ]
        announced = [client.hget(name, "brokers") for name in names]
    assert b"harbour=1@berth-harbour-0.1.0 paper=1 shioaji=1" in announced
