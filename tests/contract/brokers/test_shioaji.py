"""The Shioaji adapter, as far as it goes without the real broker: on a stand-in for the SDK's
client which uses its real order classes and errors, and on the real SDK in a process without any
network."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from infra.berth_testing.harness import MAX_STANDSTILL_S, HeardOrders, order, until
from tests.support.brokers.shioaji_client import KEYS, REAL, WITH_CERTIFICATE, ShioajiStage, fails
from tests.support.brokers.shioaji_reports import make_deal_event, make_order_event, make_trade
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.brokers.shioaji.broker import ShioajiBroker
from worker_runtime.protocol.errors import (
    BrokerError,
    BrokerUnreachable,
    LoginLimited,
    LoginRejected,
    OrderRejected,
    OutcomeUnknown,
    SessionDown,
)
from worker_runtime.protocol.messages import Credentials, OrderState, PriceType, TimeInForce


@pytest.fixture
def setting(heard: HeardOrders) -> ShioajiStage:
    return ShioajiStage(heard)


# --- what needs no SDK at all ---------------------------------------------------------------------


def test_importing_the_adapter_does_not_import_the_sdk() -> None:
    code = (
        "import sys, worker_runtime.brokers.shioaji.broker, worker_runtime.brokers.registry as r;"
        "bad = {'shioaji', 'asyncio', 'logging', 'pydantic'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "keys",
    [
        Credentials(api_key="", secret_key=""),
        Credentials(api_key="short", secret_key="B" * 44),
        Credentials(api_key="A" * 44, secret_key="short"),
        Credentials(api_key="A" * 44, secret_key="0OIl" * 11),
    ],
)
def test_a_malformed_key_is_rejected_before_the_sdk_is_touched(
    setting: ShioajiStage, keys: Credentials
) -> None:
    with pytest.raises(LoginRejected) as caught:
        setting.login(keys)
    assert setting.made == []
    assert "0OIl0OIl" not in str(caught.value)


def test_a_type_that_shioaji_lacks_is_refused(heard: HeardOrders) -> None:
    with pytest.raises(BrokerError, match="no broker type 'bonds'"):
        ShioajiBroker(ConnectionKey("shioaji", "bonds", True, "a"), heard)


#: A process whose only network is its own loopback, so that no test ever talks to the real broker.
#: (With not even a loopback, the constructor of shioaji 1.7.9 dies by SIGSEGV.)
CUT_OFF = """
import fcntl, os, socket, struct, sys, time
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.brokers.shioaji.broker import ShioajiBroker
from worker_runtime.protocol.errors import BrokerUnreachable
from worker_runtime.protocol.messages import Credentials

SIOCSIFFLAGS, UP = 0x8914, 0x1
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", UP))
broker = ShioajiBroker(ConnectionKey("shioaji", "stock", True, "a"), print)
started = time.monotonic()
try:
    broker.login(Credentials(api_key="A" * 44, secret_key="B" * 44), float(sys.argv[1]))
except BrokerUnreachable:
    print("unreachable", time.monotonic() - started)
broker.close()
print("closed", time.monotonic() - started)
print("left", len(os.listdir(os.environ["SJ_HOME_PATH"])), flush=True)
os._exit(0)  # as a session does: a login that hangs must not hold it up
"""


@pytest.mark.needs("network namespaces")
# Shorter and longer than the SDK takes (3.1 to 5.6 s).
@pytest.mark.parametrize("timeout", [1.0, 12.0])
def test_the_real_sdk_without_a_network_is_unreachable_in_time(timeout: float) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_net = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET

    def cut_off() -> None:
        if libc.unshare(new_net) and libc.unshare(new_user | new_net):
            os._exit(77)

    def attempt() -> tuple[bool, dict[str, str]]:
        done = subprocess.run(
            [sys.executable, "-c", CUT_OFF, str(timeout)],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
            preexec_fn=cut_off,
        )
        lines = done.stdout.splitlines()
        told = dict(line.split() for line in lines if line.startswith(("unr", "clo", "left")))
        assert set(told) == {"unreachable", "closed", "left"}, done.stderr
        # A login that is still under way may write another file.
        assert timeout < 5 or int(told["left"]) == 0
        unreachable, closed = float(told["unreachable"]), float(told["closed"])
        return unreachable < timeout + 0.5 and closed < unreachable + 1.0, told

    # One attempt may meet a machine that stands still; a login that waits for the SDK is late each
    # time.
    attempts: list[tuple[bool, dict[str, str]]] = []
    while not (attempts and attempts[-1][0]):
        assert len(attempts) < 3, attempts
        attempts.append(attempt())


# --- login ----------------------------------------------------------------------------------------


def test_a_login_says_simulation_and_loads_the_contracts(setting: ShioajiStage) -> None:
    setting.login()
    assert setting.made == [True]
    assert setting.client.names() == ["login", "preload"]
    setting.broker.ping(20.0)


def test_the_account_of_the_type_is_chosen_and_another_id_is_preferred_exactly(
    heard: HeardOrders,
) -> None:
    futures = ShioajiStage(heard, kind="futures", account="our-own-name")
    futures.login()
    futures.broker.positions(20.0)
    [(_, words)] = [call for call in futures.client.calls if call[0] == "list_positions"]
    assert words["account"].account_id == "222"
    assert words["unit"] == "Common"


def test_no_other_account_stands_in_for_one_that_is_named_by_the_brokers_id(
    heard: HeardOrders,
) -> None:
    ShioajiStage(heard, account="our-own-name", number="111").login()
    with pytest.raises(LoginRejected, match="1 accounts of the type Stock, none with our id"):
        ShioajiStage(heard, account="our-own-name", number="112").login()


def test_two_accounts_of_one_type_need_a_name(heard: HeardOrders) -> None:
    setting = ShioajiStage(heard, account="our-own-name")
    setting.client.accounts.append(
        REAL.Account(REAL.AccountType.Stock, "A1", "9A95", "333", True, "u")
    )
    with pytest.raises(LoginRejected):
        setting.login()
    until(lambda: "logout" in setting.client.names())  # the login itself had succeeded


def test_production_activates_the_certificate_from_a_private_file_that_does_not_stay(
    heard: HeardOrders,
) -> None:
    setting = ShioajiStage(heard, simulation=False)
    seen: list[tuple[str, bytes, int]] = []

    def activate(path: str, password: str, person_id: str) -> bool:
        seen.append((path, Path(path).read_bytes(), Path(path).stat().st_mode & 0o777))
        return (password, person_id) == ("pass", "A123456789")

    setting.client.does["activate_ca"] = activate
    setting.login(WITH_CERTIFICATE)
    [(path, content, mode)] = seen
    assert (content, mode) == (b"certificate", 0o600)
    assert not Path(path).parent.exists()


def test_production_without_a_certificate_or_with_a_bad_one_is_rejected(heard: HeardOrders) -> None:
    with pytest.raises(LoginRejected, match="certificate"):
        ShioajiStage(heard, simulation=False).login(KEYS)
    bad = ShioajiStage(heard, simulation=False)
    bad.client.does["activate_ca"] = fails("CaPasswordError")
    with pytest.raises(LoginRejected):
        bad.login(WITH_CERTIFICATE)


def test_the_sixth_connection_and_a_ban_are_limits_and_not_rejections(
    setting: ShioajiStage,
) -> None:
    setting.client.does["login"] = fails("ServerError", "451 Too Many Connections")
    with pytest.raises(LoginLimited):
        setting.login()
    setting.client.does["login"] = fails("SystemMaintenance", "503")
    with pytest.raises(LoginLimited):
        setting.login()


def test_237_a_login_that_hangs_ends_in_time_and_logs_out_when_it_comes_through(
    setting: ShioajiStage,
) -> None:
    release = threading.Event()
    setting.client.does["login"] = lambda *_: release.wait(30) and setting.client.accounts
    started = time.monotonic()
    with pytest.raises(BrokerUnreachable):
        setting.broker.login(KEYS, 0.2)
    assert time.monotonic() - started < 10.0  # the broker takes longer
    release.set()
    until(lambda: "logout" in setting.client.names())
    with pytest.raises(SessionDown):
        setting.broker.ping(20.0)


@pytest.mark.parametrize("fault", ["preload", "activate_ca", "choose"])
def test_a_login_that_comes_through_late_and_then_fails_is_logged_out(
    heard: HeardOrders, fault: str
) -> None:
    setting = ShioajiStage(heard, simulation=fault != "activate_ca")
    release = threading.Event()

    def late(*_: Any) -> Any:
        assert release.wait(30)
        return [] if fault == "choose" else setting.client.accounts

    setting.client.does["login"] = late
    setting.client.does[fault] = fails("ShioajiConnectionError")
    with pytest.raises(BrokerUnreachable):
        setting.broker.login(WITH_CERTIFICATE, 0.1)
    release.set()
    until(lambda: "logout" in setting.client.names())
    assert setting.client.names().count("logout") == 1


# --- orders ---------------------------------------------------------------------------------------


def test_an_order_goes_out_once_with_its_tag_and_less_than_its_time(setting: ShioajiStage) -> None:
    broker = setting.login()
    new_order = order(symbol="2890", price=Decimal("17.05"), quantity=3)
    placed = broker.place(new_order, 20.0)
    assert (placed.broker_order_id, placed.state) == ("531e27af", OrderState.SUBMITTED)
    [(_, sent)] = [call for call in setting.client.calls if call[0] == "place_order"]
    assert sent["contract"].code == "2890"
    assert 10_000 < sent["timeout"] < 20_000
    native = sent["order"]
    assert (native.action.value, native.price, native.quantity) == ("Buy", 17.05, 3)
    assert (native.price_type.value, native.time_in_force.value) == ("LMT", "ROD")
    assert (native.custom_field, native.account.account_id) == (new_order.tag, "111")
    assert (native.order_lot.value, native.order_cond.value) == ("Common", "Cash")


def test_a_futures_order_names_the_real_contract_behind_a_rolling_code(heard: HeardOrders) -> None:
    setting = ShioajiStage(heard, kind="futures")
    setting.login().place(order(symbol="TXFR1", price=Decimal(22000)), 20.0)
    [(_, sent)] = [call for call in setting.client.calls if call[0] == "place_order"]
    assert sent["contract"].code == "TXFA6"
    assert sent["order"].octype.value == "Auto"


def test_what_cannot_be_said_is_rejected_unsent(heard: HeardOrders) -> None:
    stock, futures = ShioajiStage(heard), ShioajiStage(heard, kind="futures")
    stock.login()
    futures.login()
    with pytest.raises(OrderRejected, match="no stock contract"):
        stock.broker.place(order(symbol="9999", price=Decimal(1)), 20.0)
    with pytest.raises(OrderRejected, match="9938"):
        futures.broker.place(order(symbol="TXFA6"), 20.0)
    # Whoever stands still for those 10 ms does not hear why; nothing is sent all the same.
    for _ in range(100):
        with pytest.raises((OrderRejected, OutcomeUnknown)) as caught:
            stock.broker.place(order(symbol="2890", price=Decimal(17)), 0.01)
        if caught.type is OrderRejected:
            break
    assert "no time" in caught.value.detail
    assert "place_order" not in stock.client.names() + futures.client.names()


@pytest.mark.parametrize(
    ("name", "error_type"),
    [
        ("ShioajiTimeoutError", OutcomeUnknown),
        ("ShioajiConnectionError", OutcomeUnknown),
        ("OrderOutcomeUnknownError", OutcomeUnknown),
        ("ServerError", OutcomeUnknown),
        ("BadRequestError", OrderRejected),
        ("TokenError", SessionDown),
    ],
)
def test_errors_of_the_call_are_distinguished_and_never_retried(
    setting: ShioajiStage, name: str, error_type: type[BrokerError]
) -> None:
    broker = setting.login()
    setting.client.does["place_order"] = fails(name)
    with pytest.raises(error_type):
        broker.place(order(symbol="2890", price=Decimal(17)), 20.0)
    assert setting.client.names().count("place_order") == 1


def test_an_sdk_that_overruns_its_timeout_leaves_the_outcome_unknown_and_tells_it_late(
    setting: ShioajiStage, heard: HeardOrders
) -> None:
    broker = setting.login()
    release = threading.Event()

    def hang(**_: Any) -> Any:
        assert release.wait(30)
        return make_trade(REAL)

    setting.client.does["place_order"] = hang
    with pytest.raises(OutcomeUnknown):
        broker.place(order(symbol="2890", price=Decimal(17)), 4.0)  # long enough to be begun
    release.set()
    [change] = heard.wait(lambda changes: len(changes) == 1)
    assert change.order.tag == "abc123"


def test_events_are_reported_once_and_those_of_the_other_account_never(
    setting: ShioajiStage, heard: HeardOrders
) -> None:
    broker = setting.login()
    broker.place(order(symbol="2890", price=Decimal("17.05"), quantity=3), 20.0)
    tell = setting.client.callback
    assert tell is not None
    deal = {**make_deal_event("1"), "account_id": "111"}
    tell(REAL.OrderState.StockDeal, deal)
    tell(REAL.OrderState.StockDeal, deal)
    tell(REAL.OrderState.StockDeal, {**make_deal_event("2"), "account_id": "222"})
    tell(REAL.OrderState.StockOrder, {"nonsense": 1})  # logged; the SDK's thread lives on
    tell(REAL.OrderState.StockOrder, make_order_event("Cancel", order_quantity=0))
    assert [(c.order.state, c.fill is not None) for c in heard.changes] == [
        (OrderState.PART_FILLED, True),
        (OrderState.CANCELLED, False),
    ]


def test_the_orders_of_the_day_are_read_anew(setting: ShioajiStage) -> None:
    broker = setting.login()
    others = setting.client.accounts[1]
    setting.client.does["list_trades"] = lambda: [
        make_trade(REAL),
        make_trade(REAL, id="x", account=others),
    ]
    assert [known.broker_order_id for known in broker.orders(20.0).orders] == ["531e27af"]
    assert setting.client.names()[-2:] == ["update_status", "list_trades"]


# --- the end of a session -------------------------------------------------------------------------


def test_a_session_that_the_broker_ends_is_down_before_anything_is_sent(
    setting: ShioajiStage,
) -> None:
    broker = setting.login()
    assert setting.client.session_down is not None
    assert broker.alive()
    setting.client.session_down()
    assert not broker.alive()
    for call in (lambda: broker.ping(20.0), lambda: broker.place(order(symbol="2890"), 20.0)):
        with pytest.raises(SessionDown):
            call()
    assert "place_order" not in setting.client.names()


def test_a_ping_tells_an_expired_token_from_a_broker_that_does_not_answer(
    setting: ShioajiStage,
) -> None:
    broker = setting.login()
    setting.client.does["usage"] = fails("TokenError")
    with pytest.raises(SessionDown):
        broker.ping(20.0)
    setting.client.does["usage"] = fails("ShioajiTimeoutError")
    with pytest.raises(BrokerUnreachable):
        broker.ping(20.0)
    setting.client.does["usage"] = lambda **_: threading.Event().wait(30)
    with pytest.raises(BrokerUnreachable):
        broker.ping(0.1)


def test_closing_logs_out_once_within_a_second_even_if_the_broker_does_not_answer(
    setting: ShioajiStage,
) -> None:
    broker = setting.login()
    setting.client.does["logout"] = lambda: threading.Event().wait(30)
    started = time.monotonic()
    broker.close()
    broker.close()
    assert time.monotonic() - started < 1.0 + MAX_STANDSTILL_S
    until(lambda: "logout" in setting.client.names())
    assert setting.client.names().count("logout") == 1
    with pytest.raises(SessionDown):
        broker.login(KEYS, 20.0)


def test_a_market_order_has_no_price_and_may_be_immediate_or_cancel(heard: HeardOrders) -> None:
    setting = ShioajiStage(heard, kind="futures")
    new_order = order(symbol="TXFA6", time_in_force=TimeInForce.IOC)
    assert new_order.price_type is PriceType.MARKET
    setting.login().place(new_order, 20.0)
    [(_, sent)] = [call for call in setting.client.calls if call[0] == "place_order"]
    assert (sent["order"].price, sent["order"].price_type.value) == (0, "MKT")
