"""A broker ends each session after a while, and its record says so: nobody notices it."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from infra.local.stack import LocalStack
from tests.support.brokers.example import install, write_example
from tests.support.systems.local import RunningSystem, Trader, until

pytestmark = [pytest.mark.drill, pytest.mark.timeout(240)]

#: Seconds that a session of Harbour lives here, and renewals that the tests wait for.
LIFE_S = 16
RENEWALS = 3


class SlowHarbour:
    """Harbour, whose logins and orders take a while, and which counts the logins that it answered
    and the sessions that it had to end."""

    def __init__(self, market: Any) -> None:
        self.market = market
        self.logins = self.ended = 0
        self._log_in, self._account_of = market.log_in, market.account_of
        self._place = market.place
        market.session_life_s = LIFE_S
        market.log_in, market.account_of = self.log_in, self.account_of
        market.place = self.place

    def place(self, account: str, terms: dict[str, Any]) -> Any:
        time.sleep(0.3)  # most of the time an order is in flight
        return self._place(account, terms)

    def log_in(self, account: str, api_key: str, secret_key: str) -> Any:
        time.sleep(0.5)  # orders come meanwhile
        opened = self._log_in(account, api_key, secret_key)
        self.logins += 1
        return opened

    def account_of(self, session: str) -> Any:
        was_open = session in self.market.sessions
        account = self._account_of(session)
        self.ended += was_open and account is None
        return account


@pytest.fixture(scope="module")
def short_lived() -> Iterator[tuple[RunningSystem, SlowHarbour]]:
    """A stack with the page's broker, whose sessions end after `LIFE_S`."""
    folder = Path(tempfile.mkdtemp(prefix="berth-lives-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user than root
    project = write_example(folder)
    record = project / "berth_harbour" / "broker.toml"
    text = record.read_text(encoding="utf-8")
    assert "life_s = 86400" in text
    record.write_text(text.replace("life_s = 86400", f"life_s = {LIFE_S}"), encoding="utf-8")
    installed = folder / "installed"
    install(installed, project)
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
                folder / "stack",
                pool_target=1,
                broker_options=options,
                calendar_file=str(calendar),
                check_duplicate_window=0.0,
            ) as stack:
                stack.wait_pool(1)
                system = RunningSystem(stack)
                yield system, SlowHarbour(market)
                system.threads.shutdown()
        server.shutdown()
        server.server_close()
    finally:
        sys.path.remove(str(installed))
        for name in [name for name in sys.modules if name.startswith("berth_harbour")]:
            del sys.modules[name]
        shutil.rmtree(folder, ignore_errors=True)


def harbour_trader(system: RunningSystem, market: Any) -> tuple[Trader, str]:
    """A user with a worker and an account at Harbour."""
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
    system.start_until_active(trader)
    return trader, account


def test_orders_in_flight_while_sessions_are_renewed_are_neither_lost_nor_doubled(
    short_lived: tuple[RunningSystem, SlowHarbour],
) -> None:
    system, broker = short_lived
    market = broker.market
    trader, account = harbour_trader(system, market)

    def place(symbol: str, state: str, **terms: Any) -> str:
        placed = system.order(trader, account_id=account, symbol=symbol, **terms)
        assert placed.status_code == 201, placed.text
        assert placed.json()["state"] == state, placed.text
        return str(placed.json()["id"])

    market.set_price("BETA.HB", Decimal("12.04"))
    terms = {"price_type": "LMT", "price": "11.00", "time_in_force": "ROD"}
    resting = place("BETA.HB", "submitted", **terms)
    logins, orders = broker.logins, 0
    deadline = time.monotonic() + 3 * RENEWALS * LIFE_S
    while broker.logins < logins + RENEWALS:
        assert time.monotonic() < deadline, broker.logins
        place("ALFA.HB", "filled")
        orders += 1

    # The broker had to end none of the sessions, and each order reached it once.
    assert broker.ended == 0
    taken = [row["symbol"] for row in market.orders if row["account"] == account]
    assert (taken.count("ALFA.HB"), taken.count("BETA.HB")) == (orders, 1)

    # The order that rested in the first session is seen and reached by the last one.
    path = f"/v1/orders/{resting}"
    cancelled = system.call("POST", f"{path}/cancel", trader.api_key, json={"request_id": "x"})
    assert cancelled.is_success, cancelled.text
    until(
        lambda: system.call("GET", path, trader.api_key).json()["state"] == "cancelled",
        "cancelled order",
    )


def test_an_idle_session_is_renewed_without_an_event_and_with_one_connection_in_the_end(
    short_lived: tuple[RunningSystem, SlowHarbour],
) -> None:
    system, broker = short_lived
    _, account = harbour_trader(system, broker.market)
    ended = broker.ended

    def own_sessions() -> list[str]:
        return [name for name, owner in [*broker.market.sessions.items()] if owner == account]

    [first] = until(lambda: own_sessions() or None, "session")

    def has_another_session() -> bool:
        sessions = own_sessions()
        return len(sessions) == 1 and sessions != [first]

    until(has_another_session, "new session in the place of the first")
    assert broker.ended == ended
