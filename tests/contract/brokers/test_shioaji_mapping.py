"""Shioaji's words in ours, with the SDK's real error classes and enums (nothing here needs a
network)."""

from __future__ import annotations

from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import needs
from tests.support.brokers.shioaji_reports import make_trade
from worker_runtime.brokers.shioaji import mapping
from worker_runtime.brokers.shioaji.broker import load_sdk
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerUnreachable,
    LoginLimited,
    LoginRejected,
    OrderRejected,
    OutcomeUnknown,
    SessionDown,
)
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce


@pytest.fixture(scope="module")
def sdk() -> Any:
    needs.require("shioaji")
    return load_sdk()


@pytest.mark.parametrize(
    ("name", "text", "error_type"),
    [
        ("AuthError", "Login failed", LoginRejected),
        ("TokenError", "Token is expired", LoginRejected),
        ("CaError", "no CA", LoginRejected),
        ("CaExpiredError", "expired", LoginRejected),
        ("CaPasswordError", "wrong password", LoginRejected),
        ("AccountNotSignError", "not signed", LoginRejected),
        ("ShioajiValueError", "invalid secret_key", LoginRejected),
        ("BadRequestError", "400", LoginRejected),
        ("ServerError", "451 Too Many Connections", LoginLimited),
        ("AuthError", "status 451", LoginLimited),
        ("SystemMaintenance", "503", LoginLimited),
        ("ServerError", "500", BrokerUnreachable),
        ("ShioajiConnectionError", "login: connection error", BrokerUnreachable),
        ("ShioajiTimeoutError", "timeout", BrokerUnreachable),
        ("ResponseRecvError", "closed", BrokerUnreachable),
        ("ShioajiPermissionError", "cache", BrokerUnreachable),
    ],
)
def test_errors_of_the_login(sdk: Any, name: str, text: str, error_type: type[BerthError]) -> None:
    assert type(mapping.login_error(getattr(sdk, name)(text))) is error_type


@pytest.mark.parametrize(
    ("name", "error_type"),
    [
        ("AuthError", SessionDown),
        ("TokenError", SessionDown),
        ("ShioajiValueError", OrderRejected),
        ("ShioajiTypeError", OrderRejected),
        ("AccountNotProvideError", OrderRejected),
        ("AccountNotSignError", OrderRejected),
        ("CaExpiredError", OrderRejected),
        ("ValidationError", OrderRejected),
        ("BadRequestError", OrderRejected),
        ("OrderOutcomeUnknownError", OutcomeUnknown),
        ("ResponseError", OutcomeUnknown),
        ("DecodeError", OutcomeUnknown),
        ("ResponseMsgError", OutcomeUnknown),
        ("ResponseRecvError", OutcomeUnknown),
        ("ShioajiConnectionError", OutcomeUnknown),
        ("ShioajiTimeoutError", OutcomeUnknown),
        ("ServerError", OutcomeUnknown),
        ("SystemMaintenance", OutcomeUnknown),
        ("ShioajiError", OutcomeUnknown),
    ],
)
def test_errors_around_an_order(sdk: Any, name: str, error_type: type[BerthError]) -> None:
    assert type(mapping.place_error(getattr(sdk, name)("text"))) is error_type


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), RuntimeError("x"), TimeoutError()]
)
def test_a_surprise_around_an_order_leaves_it_unknown(error: Exception) -> None:
    assert type(mapping.place_error(error)) is OutcomeUnknown


def test_every_error_of_the_sdk_says_something_about_an_order(sdk: Any) -> None:
    kinds = [kind for name in dir(sdk) if isinstance(kind := getattr(sdk, name), type)]
    errors = [kind for kind in kinds if issubclass(kind, sdk.ShioajiError)]
    assert len(errors) > 20
    allowed = {SessionDown, OrderRejected, OutcomeUnknown}
    assert all(type(mapping.place_error(error("text"))) in allowed for error in errors)


def test_every_status_of_the_sdk_has_a_state(sdk: Any) -> None:
    names = [
        "Cancelled",
        "Filled",
        "PartFilled",
        "Inactive",
        "Failed",
        "PendingSubmit",
        "PreSubmitted",
    ]
    states = {
        name: mapping.state_of(sdk.OrderStatus(name).value, 0, 2) for name in [*names, "Submitted"]
    }
    assert states == {
        "PendingSubmit": OrderState.SUBMITTING,
        "PreSubmitted": OrderState.SUBMITTED,
        "Submitted": OrderState.SUBMITTED,
        "PartFilled": OrderState.PART_FILLED,
        "Filled": OrderState.FILLED,
        "Cancelled": OrderState.CANCELLED,
        "Failed": OrderState.REJECTED,
        "Inactive": OrderState.UNKNOWN,
    }


@pytest.mark.parametrize(
    ("status", "filled", "state"),
    [
        ("Submitted", 1, OrderState.PART_FILLED),
        ("PendingSubmit", 2, OrderState.FILLED),
        ("Cancelled", 1, OrderState.CANCELLED),
        ("Cancelled", 2, OrderState.FILLED),
        ("SomethingNew", 0, OrderState.UNKNOWN),
    ],
)
def test_fills_prove_more_than_a_status_that_lags(
    status: str, filled: int, state: OrderState
) -> None:
    assert mapping.state_of(status, filled, 2) is state


def test_a_trade_becomes_an_order(sdk: Any) -> None:
    order = mapping.order_of(make_trade(sdk, deals=[("000001", 1, 17.0, 1673501631.629)]))
    assert (order.broker_order_id, order.tag, order.symbol) == ("531e27af", "abc123", "2890")
    assert (order.side, order.quantity, order.time_in_force) == (Side.BUY, 3, TimeInForce.ROD)
    assert (order.price_type, order.price) == (PriceType.LIMIT, Decimal("17.05"))
    assert order.state is OrderState.PART_FILLED
    [fill] = order.fills
    assert (fill.fill_id, fill.quantity, fill.price) == ("531e27af-000001", 1, Decimal("17.0"))
    assert fill.at_ms == 1673501631629


def test_a_market_order_has_no_price_and_a_reduced_one_its_new_quantity(sdk: Any) -> None:
    order = mapping.order_of(
        make_trade(sdk, price_type="MKT", price=0, order_quantity=1, action="Sell")
    )
    assert (order.price, order.quantity, order.side) == (None, 1, Side.SELL)


@pytest.mark.parametrize(("kept_quantity", "filled"), [(2, 2), (0, 0)])
def test_an_order_whose_rest_was_cancelled_is_not_filled(
    sdk: Any, kept_quantity: int, filled: int
) -> None:
    """The manual's examples: `order_quantity` is what was not cancelled, so at the end what was
    filled."""
    deals = [("000001", filled, 17.0, 1673501631.629)] if filled else []
    order = mapping.order_of(
        make_trade(sdk, status="Cancelled", order_quantity=kept_quantity, deals=deals)
    )
    assert (order.state, order.quantity) == (OrderState.CANCELLED, 3)
    assert sum(fill.quantity for fill in order.fills) == filled


def test_positions_get_a_sign_for_their_direction(sdk: Any) -> None:
    reports = [
        SimpleNamespace(code="2890", direction=sdk.Action.Buy, quantity=2, price=17.05),
        SimpleNamespace(code="TXFA6", direction=sdk.Action.Sell, quantity=1, price=22000.0),
    ]
    assert [(p.symbol, p.quantity, p.average_price) for p in mapping.positions_of(reports)] == [
        ("2890", 2, Decimal("17.05")),
        ("TXFA6", -1, Decimal("22000.0")),
    ]
