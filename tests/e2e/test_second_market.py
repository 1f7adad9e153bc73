"""A broker of another distribution, with a market of its own, is traded next to the paper
exchange."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from infra.database.engine import Database
from infra.database.trading import instruments
from infra.database.trading.models import InstrumentLoad, InstrumentRow
from infra.local.stack import LocalStack
from tests.support.brokers.example import install, write_example
from tests.support.systems.local import RunningSystem, Trader
from worker_runtime.protocol.instruments import Instrument, InstrumentKind, PriceStep

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
            options = {"harbour": {"simulation_address": f"127.0.0.1:{server.server_address[1]}"}}
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


def test_a_signal_counts_shares_by_the_lots_and_the_steps_of_its_accounts_market(
    both: tuple[RunningSystem, Any, Trader],
) -> None:
    system, market, trader = both
    account = f"hb-{trader.user_id}"
    market.set_price("ETA.HB", Decimal("12.04"))
    made = system.call(
        "POST",
        f"/v1/users/{trader.user_id}/webhooks",
        trader.api_key,
        json={"account_id": account, "quantity_unit": "shares"},
    )
    assert made.status_code == 201, made.text
    webhook = made.json()

    def send(action: str, **fields: Any) -> dict[str, Any]:
        said = {"secret": webhook["secret"], "time": datetime.now(UTC).isoformat()}
        body = said | {"action": action, "symbol": "ETA.HB"} | fields
        deadline = time.monotonic() + 20
        while (answer := system.call("POST", webhook["path"], "", json=body)).status_code == 202:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.2)
        outcome: dict[str, Any] = answer.json()
        return outcome

    # Ten shares are a lot; the position is counted in shares, too.
    bought = send("buy", quantity="30")
    assert bought.get("quantity") == 3, bought
    moved = send("position", position_size="50")
    assert [leg["quantity"] for leg in moved["legs"]] == [2], moved
    assert send("buy", quantity="35")["code"] == "ODD_LOT_REFUSED"
    # The next step down is a buyer's.
    limited = send("buy", quantity="10", price_type="LMT", price="12.03", time_in_force="IOC")
    assert (limited["price"], limited["quantity"]) == ("12.02", 1), limited
    ordered = [row["quantity"] for row in market.orders if row["account"] == account]
    assert ordered == [3, 2, 1]


def test_prices_keep_the_steps_and_limits_of_their_own_market(
    both: tuple[RunningSystem, Any, Trader],
) -> None:
    system, market, trader = both
    account = f"hb-{trader.user_id}"
    market.set_price("BETA.HB", Decimal("12.04"))

    def at_harbour(price: str, **changes: Any) -> tuple[int, dict[str, Any]]:
        terms: dict[str, Any] = {
            "symbol": "BETA.HB",
            "quantity": 1,
            "price_type": "LMT",
            "time_in_force": "IOC",
        }
        answer = system.order(trader, account_id=account, price=price, **terms | changes)
        return answer.status_code, answer.json()

    # The record's table of steps: 12.03 is between two of them, and reaches no broker.
    status, refused = at_harbour("12.03")
    assert (status, refused["code"]) == (422, "PRICE_OFF_TICK")
    assert "12.02 and 12.04" in refused["detail"]
    assert market.orders == [row for row in market.orders if row["account"] != account]
    # Rounded to the passive side, a buyer's price is too low, and a seller's is paid.
    status, order = at_harbour("12.03", price_rounding="passive")
    assert (status, order["price"], order["state"]) == (201, "12.02", "cancelled"), order
    status, order = at_harbour("12.03", side="sell", price_rounding="passive")
    assert (status, order["price"], order["state"]) == (201, "12.04", "filled"), order
    # The paper exchange takes any price, unless the installation says otherwise.
    paper = system.order(trader, price_type="LMT", price="600.123", time_in_force="IOC")
    assert paper.json()["state"] in ("filled", "cancelled"), paper.text

    # The broker's list of today: other steps, limits of the day, and a lot of 20.
    # From now on it alone says which symbols Harbour has: tests that trade others come before.
    asyncio.run(list_instrument(system))
    market.set_price("DELTA.HB", Decimal(15))
    deadline = datetime.now().timestamp() + 60

    def until_refused(price: str, code: str) -> str:
        """Returns the detail of the refusal, once the API process that is asked knows the list."""
        while (answer := at_harbour(price, symbol="DELTA.HB"))[1].get("code") != code:
            assert datetime.now().timestamp() < deadline, answer
            time.sleep(0.5)  # what is asked more often is refused for that
        return str(answer[1]["detail"])

    assert "highest price of DELTA.HB, which is 15.2" in until_refused("15.6", "PRICE_LIMIT")
    until_refused("15.1", "PRICE_OFF_TICK")
    status, order = at_harbour("15.2", symbol="DELTA.HB")
    assert (status, order["state"]) == (201, "filled"), order
    limit = system.call(
        "PUT",
        f"/v1/users/{trader.user_id}/accounts/{account}/limits",
        system.stack.admin_key,
        json={"max_notional": "1000"},
    )
    assert limit.is_success, limit.text
    while "1200 EUR" not in (detail := at_harbour("15", symbol="DELTA.HB", quantity=4)[1]).get(
        "detail", ""
    ):
        assert datetime.now().timestamp() < deadline, detail
        time.sleep(0.5)


async def list_instrument(system: RunningSystem) -> None:
    """As if Harbour's list had been loaded today: it has one instrument."""
    today = datetime.now(ZoneInfo("Europe/Lisbon")).date()
    listed = Instrument(
        code="DELTA.HB",
        market="spot",
        kind=InstrumentKind.STOCK,
        lot_units=20,
        lot_value=Decimal(20),
        ticks=(PriceStep(tick=Decimal("0.2")),),
        limit_up=Decimal("15.2"),
        limit_down=Decimal("14.8"),
    )
    database = Database(system.stack.settings.database_url)
    try:
        async with database.session() as session:
            session.add(
                InstrumentLoad(
                    broker="harbour",
                    user_id="-",
                    account_id="-",
                    trading_day=today,
                    state="loaded",
                    markets=["spot"],
                )
            )
            values = instruments.told_values(listed)
            session.add(InstrumentRow(broker="harbour", loaded_on=today, **values))
    finally:
        await database.close()


def test_the_workers_announce_their_brokers(both: tuple[RunningSystem, Any, Trader]) -> None:
    system, _, trader = both
    with system.valkey() as client:
        names = [
            name for name in client.scan_iter(f"*{trader.user_id}*") if client.type(name) == b"hash"
        ]
        announced = [client.hget(name, "brokers") for name in names]
    assert b"harbour=1@berth-harbour-0.1.0 paper=3 shioaji=3" in announced
