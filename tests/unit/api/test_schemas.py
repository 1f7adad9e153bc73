"""The schemas refuse what no broker should ever see."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from api.http.fields import EXAMPLES
from api.keys.schemas import ApiKeyRequest, AuditQuery
from api.orders.schemas import MAX_QUANTITY, OrderRequest
from api.users.schemas import CredentialsRequest, UserRequest, check_lengths
from api.workers.schemas import ReasonBody
from worker_runtime.protocol.installed_brokers import built_in_brokers

ORDER = EXAMPLES["OrderRequest"][0]


def order(**changes: Any) -> OrderRequest:
    return OrderRequest.model_validate_json(json.dumps({**ORDER, **changes}))


def test_the_example_is_a_valid_order() -> None:
    assert str(order().price) == "1005.5"


@pytest.mark.parametrize(
    "changes",
    [
        {"quantity": 0},
        {"quantity": -1},
        {"quantity": 1.5},
        {"quantity": 1.0},
        {"quantity": "1"},
        {"quantity": True},
        {"quantity": None},
        {"quantity": MAX_QUANTITY + 1},
        {"price": 0},
        {"price": "-1"},
        {"price": "NaN"},
        {"price": float("nan")},
        {"price": "Infinity"},
        {"price": float("inf")},
        {"price": "1e30"},
        {"price": "0.00001"},
        {"price": "12345678901.0"},
        {"price": "ten"},
        {"price": None},
        {"price_type": "MKT"},
        {"price_type": "lmt"},
        {"side": "hold"},
        {"time_in_force": "GTC"},
        {"symbol": ""},
        {"symbol": "2330 "},
        {"symbol": "2" * 33},
        {"symbol": "2330\n"},
        {"client_order_id": ""},
        {"client_order_id": "a b"},
        {"client_order_id": "a|b"},
        {"client_order_id": "x" * 65},
        {"account_id": "{a}"},
        {"account_id": "../etc"},
        {"account_id": "x" * 65},
        {"unknown": 1},
        {"order_id": "mine"},
    ],
)
def test_an_order_that_cannot_be_right_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        order(**changes)


@pytest.mark.parametrize(
    "missing", ["client_order_id", "account_id", "symbol", "side", "quantity", "price"]
)
def test_a_field_without_default_must_be_there(missing: str) -> None:
    body = {name: value for name, value in ORDER.items() if name != missing}
    with pytest.raises(ValidationError):
        OrderRequest.model_validate(body)


def test_a_market_order_has_no_price() -> None:
    assert order(price_type="MKT", price=None, time_in_force="IOC").price is None


@pytest.mark.parametrize("given", ["10.1", 10.1, "10.10"])
def test_a_price_stays_exactly_what_was_written(given: object) -> None:
    price = order(price=given).price
    assert price is not None
    assert format(price.normalize(), "f") == "10.1"


@pytest.mark.parametrize("user_id", ["", "-1", "a b", "a/b", "{a}", "ü", "x" * 65, ".a", "a\n"])
def test_a_user_id_fits_into_keys_and_paths(user_id: str) -> None:
    with pytest.raises(ValidationError):
        UserRequest.model_validate({"user_id": user_id})


def credentials(**changes: Any) -> dict[str, Any]:
    return {"broker": "paper", "api_key": "key", "secret_key": "canary-secret", **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"broker": "other"},
        {"broker_type": "Stock!"},
        {"api_key": ""},
        {"secret_key": "x" * 513},
        {"person_id": "x" * 33},
        {"ca_certificate": "not base64 ***"},
        {"password": "x"},
    ],
)
def test_credentials_out_of_limits_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CredentialsRequest.model_validate(credentials(**changes))


def test_a_field_of_credentials_is_no_longer_than_the_brokers_record_says() -> None:
    record = built_in_brokers()["paper"].record
    body = CredentialsRequest.model_validate(credentials(api_key="canary" + "x" * 59))
    check_lengths(record, body)
    short = msgspec.structs.replace(record.credentials["api_key"], max_length=64)
    strict = msgspec.structs.replace(record, credentials={"api_key": short})
    with pytest.raises(ValueError, match=r"`api_key` has 65 characters; .* at most 64") as refused:
        check_lengths(strict, body)
    assert "canary" not in str(refused.value)


def test_credentials_do_not_show_in_their_representation() -> None:
    body = CredentialsRequest.model_validate(credentials(ca_certificate="Y2FuYXJ5LWNlcnQ="))
    assert body.ca_certificate == b"canary-cert"
    assert "canary" not in repr(body)
    assert "canary" not in str(body)


def test_a_reason_is_text_of_any_script() -> None:
    assert ReasonBody(reason="券商維護, Café 🛠").reason == "券商維護, Café 🛠"


@pytest.mark.parametrize("sign", ["\n", "\x00", "\x7f", "\x9b", "\u2028", "\u202e", "\u2066"])
def test_a_reason_with_control_characters_is_refused(sign: str) -> None:
    for text in (f"line{sign}break", f"line{sign}"):
        with pytest.raises(ValidationError):
            ReasonBody(reason=text)


@pytest.mark.parametrize(
    "at", ["9999-12-31T23:59:59Z", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00"]
)
def test_a_time_that_no_clock_of_another_zone_can_show_is_refused(at: str) -> None:
    with pytest.raises(ValidationError, match="expires_at"):
        ApiKeyRequest.model_validate({"role": "admin", "label": "for ever", "expires_at": at})
    with pytest.raises(ValidationError, match="since"):
        AuditQuery.model_validate({"since": at})
