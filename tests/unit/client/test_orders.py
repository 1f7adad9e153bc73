"""An order's request is repeated, the same each time, until its outcome is known, and not
longer."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from infra.client.client import BerthClient
from infra.client.errors import ApiError, OutcomeUnsettled, UnexpectedAnswer, Unreachable
from infra.client.models import (
    BrokerCredentials,
    CancelTicket,
    CreatedUser,
    OrderSnapshot,
    OrderTicket,
    ReplaceTicket,
)
from tests.support.clients.scripted_transport import KEY, URL, ScriptedTransport

TICKET = OrderTicket(account_id="main", symbol="2330", side="buy", quantity=1, price_type="MKT")


def view(state: str = "filled", **changes: Any) -> dict[str, Any]:
    return {
        "id": "o-1",
        "client_order_id": TICKET.client_order_id,
        "user_id": "alice",
        "account_id": "main",
        "symbol": "2330",
        "side": "buy",
        "quantity": 1,
        "price_type": "MKT",
        "price": None,
        "time_in_force": "ROD",
        "state": state,
        "broker_order_id": None,
        "final": state in ("filled", "cancelled", "rejected", "expired"),
        "filled_quantity": 0,
        "average_price": "1005.5",
        "code": None,
        "reason": None,
        "accepted_at": "2026-11-21T01:00:00Z",
        **changes,
    }


def place(api: ScriptedTransport, patience: float = 30.0) -> OrderSnapshot:
    order: OrderSnapshot = api.run(
        lambda client: client.place_order("alice", TICKET, patience=patience)
    )
    return order


def test_an_order_is_one_request_with_the_key_in_its_header(api: ScriptedTransport) -> None:
    api.answer(view(), 201)
    order = place(api)
    assert (order.state, order.id, str(order.average_price)) == ("filled", "o-1", "1005.5")
    (asked,) = api.asked
    # Exactly this: the API reads such a request itself, and has FastAPI read any other.
    assert str(asked.url) == f"{URL}/v1/users/alice/orders"
    assert asked.headers["content-type"] == "application/json"
    assert asked.headers["x-api-key"] == KEY


def test_usual_terms_are_not_sent_so_that_an_older_api_takes_the_order(
    api: ScriptedTransport,
) -> None:
    api.answer(view(), 201)
    place(api)
    (asked,) = api.asked
    sent = msgspec.json.decode(asked.content)
    assert sent == {
        "account_id": "main",
        "symbol": "2330",
        "side": "buy",
        "quantity": 1,
        "price_type": "MKT",
        "client_order_id": TICKET.client_order_id,
    }
    odd = msgspec.structs.replace(TICKET, lot="odd", client_order_id="mine")
    assert msgspec.to_builtins(odd)["lot"] == "odd"
    assert msgspec.to_builtins(odd)["client_order_id"] == "mine"


def test_every_ticket_has_an_id_of_its_own() -> None:
    assert (
        len(
            {
                OrderTicket(account_id="a", symbol="s", side="buy", quantity=1).client_order_id
                for _ in "12"
            }
        )
        == 2
    )


@pytest.mark.parametrize(
    "trouble", ["202", "cut", "late", "nobody", "503", "503 with the order", "502", "HTML"]
)
def test_the_same_request_is_repeated_until_the_outcome_is_known(
    api: ScriptedTransport, trouble: str
) -> None:
    match trouble:
        case "202":
            api.answer(view("submitting"), 202)
        case "cut":
            api.fail(httpx.RemoteProtocolError)
        case "late":
            api.fail(httpx.ReadTimeout)
        case "nobody":
            api.fail(httpx.ConnectError)
        case "503":
            api.refuse(503, "DATABASE_UNAVAILABLE", retryable=True)
        case "503 with the order":
            api.refuse(503, "VALKEY_UNAVAILABLE", retryable=True, order=view("accepted"))
        case "502":
            api.answers.append(httpx.Response(502, text="<html>"))
        case "HTML":
            api.answers.append(httpx.Response(200, text="<html>"))
    api.answer(view(), 200)
    assert place(api).state == "filled"
    first, second = api.bodies()
    assert first == second
    assert first["client_order_id"] == TICKET.client_order_id


def test_a_refusal_is_raised_with_its_code_and_nothing_is_repeated(api: ScriptedTransport) -> None:
    api.refuse(423, "TRADING_HALTED", request_id="r-1")
    with pytest.raises(ApiError, match="TRADING_HALTED: why") as refused:
        place(api)
    error = refused.value
    assert (error.status, error.code, error.order, error.request_id) == (
        423,
        "TRADING_HALTED",
        None,
        "r-1",
    )
    assert len(api.asked) == 1


def test_an_order_that_ended_before_the_broker_is_not_repeated_whatever_is_retryable(
    api: ScriptedTransport,
) -> None:
    api.refuse(503, "WORKER_UNAVAILABLE", retryable=True, order=view("rejected"))
    with pytest.raises(ApiError) as refused:
        place(api)
    assert refused.value.order is not None
    assert (refused.value.order.state, len(api.asked)) == ("rejected", 1)


def test_nothing_was_sent_while_nobody_answers(api: ScriptedTransport) -> None:
    api.fail(httpx.ConnectError)
    with pytest.raises(Unreachable) as failed:
        place(api, patience=0.5)
    assert not failed.value.sent
    assert len(api.asked) >= 2


def test_a_refusal_after_a_lost_answer_settles_nothing(api: ScriptedTransport) -> None:
    """The API may still be at the first request: a client that takes the refusal for an end would
    place another order."""
    api.fail(httpx.ReadError)
    api.refuse(423, "TRADING_HALTED")
    with pytest.raises(OutcomeUnsettled) as unsettled:
        place(api)
    assert isinstance(unsettled.value.__cause__, ApiError)
    assert (unsettled.value.ticket_id, unsettled.value.order) == (TICKET.client_order_id, None)


def test_a_refusal_after_attempts_that_were_not_sent_is_one(api: ScriptedTransport) -> None:
    api.fail(httpx.ConnectTimeout)
    api.refuse(429, "RATE_LIMITED", retryable=True)
    api.refuse(423, "TRADING_HALTED")
    with pytest.raises(ApiError, match="TRADING_HALTED"):
        place(api)


def test_patience_ends_with_the_order_as_it_was_last_seen(api: ScriptedTransport) -> None:
    api.answer(view("unknown"), 202)
    with pytest.raises(OutcomeUnsettled, match="last seen as unknown") as unsettled:
        place(api, patience=0.5)
    assert unsettled.value.order is not None
    assert unsettled.value.order.state == "unknown"


def test_a_pause_that_the_api_asks_for_is_kept(api: ScriptedTransport) -> None:
    api.answers.append(
        httpx.Response(429, json={"code": "BUSY", "retryable": True}, headers={"Retry-After": "9"})
    )
    with pytest.raises(ApiError) as refused:
        place(api, patience=5.0)  # the pause would pass it
    assert (refused.value.retry_after, len(api.asked)) == (9.0, 1)


def test_a_cancel_is_repeated_and_the_end_of_the_order_settles_it(api: ScriptedTransport) -> None:
    api.answer(view("submitted"), 202)
    api.refuse(409, "ORDER_SETTLED")
    ticket = CancelTicket()
    with pytest.raises(ApiError, match="ORDER_SETTLED"):
        api.run(lambda client: client.cancel_order("o-1", ticket))
    assert api.bodies() == [{"request_id": ticket.request_id}] * 2
    assert api.asked[0].url.path == "/v1/orders/o-1/cancel"


def test_a_change_is_repeated_under_its_id(api: ScriptedTransport) -> None:
    api.refuse(504, "NO_ANSWER", retryable=True)
    api.answer(view("submitted"))
    ticket = ReplaceTicket(quantity=1, request_id="r-1")
    order = api.run(lambda client: client.replace_order("o-1", ticket, wait=3))
    assert order.state == "submitted"
    assert api.bodies() == [{"quantity": 1, "price": None, "request_id": "r-1"}] * 2
    assert api.asked[0].url.query == b"wait=3"


def test_what_is_not_an_order_is_sent_once(api: ScriptedTransport) -> None:
    api.fail(httpx.ReadError)
    with pytest.raises(Unreachable) as failed:
        api.run(lambda client: client.create_user("bob"))
    assert (failed.value.sent, len(api.asked)) == (True, 1)
    api.answers[:] = [httpx.Response(302, headers={"Location": "http://elsewhere.example"})]
    with pytest.raises(UnexpectedAnswer, match=r"api\.example/.* redirects elsewhere"):
        api.run(lambda client: client.get_order("o-1"))
    assert [request.url.host for request in api.asked] == ["api.example"] * 2


def test_a_new_users_key_has_the_scopes_that_are_asked_for(api: ScriptedTransport) -> None:
    made = {"user_id": "bob", "created_at": "2026-11-27T00:00:00Z", "api_key": "secret"}
    for _ in range(2):
        api.answer(made, 201)
    api.run(lambda client: client.create_user("bob", scopes=["read"]))
    api.run(lambda client: client.create_user())
    assert api.bodies() == [{"user_id": "bob", "scopes": ["read"]}, {}]


def test_a_worker_that_is_not_started_in_time_is_none(api: ScriptedTransport) -> None:
    api.answer({"user_id": "alice", "signal": "start"}, 202)
    assert api.run(lambda client: client.start_worker("alice", wait=1)) is None


def test_no_id_leaves_its_place_in_the_path(api: ScriptedTransport) -> None:
    api.answer({"orders": [], "next_cursor": None})
    api.run(
        lambda client: client.list_orders(
            "a/../b?c", state=["open", "filled"], symbol=None, limit=5
        )
    )
    url = api.asked[0].url
    assert url.raw_path == b"/v1/users/a%2F..%2Fb%3Fc/orders?state=open&state=filled&limit=5"


def test_no_secret_is_shown() -> None:
    made = BrokerCredentials(
        broker="paper", api_key="canary", secret_key="canary", ca_password="canary"
    )
    stored = CreatedUser(user_id="bob", created_at=None, api_key="canary")  # type: ignore[arg-type]
    assert "canary" not in f"{made!r} {made} {stored!r} {BerthClient(URL, 'canary')!r}"


@pytest.mark.parametrize(
    ("url", "key"),
    [("api.example", KEY), ("http://x:y", KEY), (URL, ""), (URL, "a\nb"), (URL, "ü")],
)
def test_a_malformed_url_or_key_is_refused_at_once(url: str, key: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (Berth API )?URL|no API key"):
        BerthClient(url, key)


@pytest.mark.parametrize(("order", "in_path"), [(".", "%2E"), ("..", "%2E%2E"), ("a..", "a..")])
def test_an_id_of_dots_is_not_another_path(
    api: ScriptedTransport, order: str, in_path: str
) -> None:
    api.answer(view("cancelled"))
    api.run(lambda client: client.cancel_order(order))
    assert api.asked[0].url.raw_path.decode() == f"/v1/orders/{in_path}/cancel"
