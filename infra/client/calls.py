"""Implements what a client does, written once for both clients, without I/O.

A call is a generator: it yields a request to send, or seconds to rest; it is given the response, or
why there was none; it returns the result. The clients in `client.py` only send and rest.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from . import models
from .errors import ApiError, OutcomeUnsettled, UnexpectedAnswer, Unreachable, decode_answer
from .events import Subscription

#: Seconds to connect, and for an answer on top of what the API itself may wait.
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 5.0, 10.0
#: Seconds that the API waits for an outcome when a call does not say: its own default.
DEFAULT_WAIT_S = 10.0
#: Seconds within which an outcome is asked for again.
OUTCOME_TIMEOUT_S = 60.0
#: Seconds before a call is repeated the first time, doubled with each repeat, and at most.
FIRST_RETRY_INTERVAL_S, MAX_RETRY_INTERVAL_S = 0.2, 5.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A request, as httpx takes it."""

    method: str
    #: Behind `/v1`.
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    body: object = None
    #: Seconds that the API itself may wait before it answers.
    wait: float = 0.0

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `httpx.Client.request`."""
        options: dict[str, Any] = {
            "method": self.method,
            "url": self.path,
            # None: an empty dict would take away the path's own query.
            "params": {name: value for name, value in self.query.items() if value is not None}
            or None,
            "timeout": httpx.Timeout(ANSWER_TIMEOUT_S + self.wait, connect=CONNECT_TIMEOUT_S),
        }
        if self.body is not None:
            options["content"] = msgspec.json.encode(self.body)
            options["headers"] = {"Content-Type": "application/json"}
        return options


Call = Generator[ApiRequest | float, Any, T]


@dataclass(frozen=True)
class ApiReply:
    """A successful answer. `done` is False for 202: the API is still working on it."""

    done: bool
    body: Any


def url_path(*parts: str) -> str:
    """Returns a path of these parts; none of them can leave its place."""
    # httpx would resolve a part that is `.` or `..`, but not its escaped form.
    return "".join(
        f"/{quote(part, safe='') if part.strip('.') else '%2E' * len(part)}" for part in parts
    )


def _answer_to(request: ApiRequest) -> Call[httpx.Response]:
    answer = yield request
    if isinstance(answer, Unreachable):
        raise answer
    response: httpx.Response = answer
    return response


def _get(
    kind: type[T], path: str, query: Mapping[str, Any] | None = None, wait: float = 0.0
) -> Call[T]:
    answer = yield from _answer_to(
        ApiRequest(method="GET", path=path, query=query or {}, wait=wait)
    )
    decoded: T = decode_answer(answer, kind)
    return decoded


def request(
    method: str,
    path: str,
    *,
    query: Mapping[str, Any] | None = None,
    body: object = None,
    wait: float | None = None,
) -> Call[ApiReply]:
    """Calls any operation of the API, by its path behind `/v1`; the reply's body is decoded JSON.

    `wait`: seconds that the API may wait for the outcome. Sent once. Raises `ApiError`,
    `Unreachable`, `UnexpectedAnswer`.
    """
    asked = {**(query or {}), "wait": wait}
    answer = yield from _answer_to(
        ApiRequest(method=method, path=path, query=asked, body=body, wait=wait or 0.0)
    )
    return ApiReply(answer.status_code != 202, decode_answer(answer, Any))


def create_user(
    user_id: str | None = None, *, scopes: Sequence[str] | None = None
) -> Call[models.CreatedUser]:
    """Creates a user, with an API key that is shown this once. Needs an administrator's key.

    Without `user_id` one is made up. `scopes`: what the user's key may do, none that the calling
    key does not have; None: all that a user may do. Sent once. Raises `ApiError` (`USER_EXISTS`,
    `GRANT_TOO_WIDE`), `Unreachable`.
    """
    body: dict[str, Any] = {} if user_id is None else {"user_id": user_id}
    if scopes is not None:
        body["scopes"] = list(scopes)
    asked = ApiRequest(method="POST", path="/users", body=body)
    answer = yield from _answer_to(asked)
    created: models.CreatedUser = decode_answer(answer, models.CreatedUser)
    return created


def get_own_key() -> Call[models.KeySnapshot]:
    """Returns the API key that this client uses: what it may do, from where, and until when.

    Raises `ApiError`, `Unreachable`.
    """
    return _get(models.KeySnapshot, "/api-keys/self")


def list_api_keys(
    user_id: str | None = None, *, revoked: bool = False, cursor: uuid.UUID | None = None
) -> Call[models.KeyPage]:
    """Lists API keys, the latest first: a user's own ones, for administrators all. Needs the scope
    `keys`.

    Raises `ApiError`, `Unreachable`.
    """
    asked = {"user_id": user_id, "revoked": revoked or None, "cursor": cursor and str(cursor)}
    return _get(models.KeyPage, "/api-keys", asked)


def create_api_key(
    label: str,
    *,
    role: models.KeyRole = "user",
    user_id: str | None = None,
    scopes: Sequence[str] | None = None,
    sources: Sequence[str] = (),
    days: float | None = 90.0,
) -> Call[models.CreatedKey]:
    """Makes an API key, which is shown this once. Needs an administrator's key with the scope
    `keys`.

    Without `scopes` it may do all that the role may do; `days` until it ends, None: it does not.
    Sent once. Raises `ApiError` (`GRANT_TOO_WIDE`), `Unreachable`.
    """
    ends = None if days is None else (datetime.now(UTC) + timedelta(days=days)).isoformat()
    body: dict[str, Any] = {"label": label, "role": role, "user_id": user_id, "expires_at": ends}
    body |= {"scopes": None if scopes is None else list(scopes), "sources": list(sources)}
    answer = yield from _answer_to(ApiRequest(method="POST", path="/api-keys", body=body))
    key: models.CreatedKey = decode_answer(answer, models.CreatedKey)
    return key


def rotate_api_key(
    key_id: uuid.UUID | None = None, *, overlap_hours: float = 24.0
) -> Call[models.CreatedKey]:
    """Makes a key in place of another, which ends after the overlap; without `key_id` of the one in
    use.

    The client continues with the key that it has: make a new client. Needs the scope `keys`. Sent
    once. Raises `ApiError` (`API_KEY_NOT_FOUND`, `GRANT_TOO_WIDE`), `Unreachable`.
    """
    path = url_path("api-keys", "self" if key_id is None else str(key_id), "rotate")
    asked = ApiRequest(method="POST", path=path, body={"overlap_hours": overlap_hours})
    answer = yield from _answer_to(asked)
    key: models.CreatedKey = decode_answer(answer, models.CreatedKey)
    return key


def revoke_api_key(
    key_id: uuid.UUID | None = None,
    *,
    reason: str = "requested",
    webhooks: bool = False,
    keys: bool = False,
) -> Call[models.KeySnapshot]:
    """Ends a key at once; without `key_id` the client's own one, for which no scope is needed.

    `webhooks` and `keys`: also what it has made. Sent once; safe to repeat. Raises `ApiError`,
    `Unreachable`.
    """
    path = url_path("api-keys", "self" if key_id is None else str(key_id))
    query = {"reason": reason, "webhooks": webhooks or None, "keys": keys or None}
    answer = yield from _answer_to(ApiRequest(method="DELETE", path=path, query=query))
    key: models.KeySnapshot = decode_answer(answer, models.KeySnapshot)
    return key


def store_credentials(
    user_id: str, account_id: str, credentials: models.BrokerCredentials
) -> Call[models.CredentialsReceipt]:
    """Stores what the broker's login of one account needs; a running worker is told to load it.

    Sent once; safe to repeat. Raises `ApiError`, `Unreachable`.
    """
    path = url_path("users", user_id, "accounts", account_id, "credentials")
    answer = yield from _answer_to(ApiRequest(method="PUT", path=path, body=credentials))
    receipt: models.CredentialsReceipt = decode_answer(answer, models.CredentialsReceipt)
    return receipt


def get_positions(user_id: str, account_id: str) -> Call[models.AccountPositions]:
    """Returns the open positions of an account, as the broker reports them. Raises `ApiError`,
    `Unreachable`."""
    path = url_path("users", user_id, "accounts", account_id, "positions")
    return _get(models.AccountPositions, path, wait=20.0)


def get_balance(user_id: str, account_id: str) -> Call[models.AccountBalance]:
    """Returns the money of an account, as the broker reports it. Raises `ApiError`,
    `Unreachable`."""
    path = url_path("users", user_id, "accounts", account_id, "balance")
    return _get(models.AccountBalance, path, wait=20.0)


def get_instrument(broker: str, code: str) -> Call[models.ListedInstrument]:
    """Returns an instrument that a broker lists, or listed of late. Raises `ApiError`
    (`INSTRUMENT_NOT_FOUND`), `Unreachable`."""
    return _get(models.ListedInstrument, url_path("instruments", broker, code))


def list_instruments(
    query: str = "",
    *,
    broker: str | None = None,
    market: str | None = None,
    kind: models.InstrumentKind | None = None,
    after: str = "",
    limit: int = 100,
) -> Call[models.InstrumentListPage]:
    """Lists a page of instruments, by broker and code: at most `limit` (1 to 1000) behind `after`.

    `query`: the beginning of a code or a part of a name. Raises `ApiError`, `Unreachable`.
    """
    given: dict[str, Any] = {"query": query, "broker": broker, "market": market, "kind": kind}
    given |= {"after": after, "limit": limit}
    return _get(models.InstrumentListPage, url_path("instruments"), given)


def place_order(
    user_id: str,
    ticket: models.OrderTicket,
    *,
    wait: float | None = None,
    patience: float = OUTCOME_TIMEOUT_S,
) -> Call[models.OrderSnapshot]:
    """Places an order, once, and repeats the request until its outcome is known.

    It is known when the broker has answered, also when it has rejected the order. `wait`: seconds
    that the API may hold one request (0 to 30; its own default without). `patience`: seconds until
    the last repeat.

    Raises `OutcomeUnsettled` when patience ends before the outcome is known: place the same ticket
    again to continue. Raises `ApiError` when the order did not reach the broker, and `Unreachable`
    when nothing was sent: a new ticket may be placed then.
    """
    path = url_path("users", user_id, "orders")
    return _settle_order(path, ticket, ticket.client_order_id, wait, patience, is_new=True)


def cancel_order(
    order_id: str,
    ticket: models.CancelTicket | None = None,
    *,
    wait: float | None = None,
    patience: float = OUTCOME_TIMEOUT_S,
) -> Call[models.OrderSnapshot]:
    """Takes an order back, and repeats the request until it is cancelled; seconds as in
    `place_order`.

    Raises `ApiError` with `ORDER_SETTLED` when it ended otherwise, `OutcomeUnsettled`,
    `Unreachable`.
    """
    ticket = ticket or models.CancelTicket()
    return _settle_order(
        url_path("orders", order_id, "cancel"), ticket, ticket.request_id, wait, patience
    )


def replace_order(
    order_id: str,
    ticket: models.ReplaceTicket,
    *,
    wait: float | None = None,
    patience: float = OUTCOME_TIMEOUT_S,
) -> Call[models.OrderSnapshot]:
    """Changes a working order, once, and repeats the request until the broker has changed it.

    Seconds and errors as in `place_order`.
    """
    return _settle_order(
        url_path("orders", order_id, "replace"), ticket, ticket.request_id, wait, patience
    )


def _settle_order(
    path: str,
    body: object,
    ticket_id: str,
    wait: float | None,
    patience: float,
    *,
    is_new: bool = False,
) -> Call[models.OrderSnapshot]:
    """Sends the same request until its answer settles it; the API answers a repeat with the first
    outcome.

    `is_new`: it places an order. Then a refusal without the order settles it only while no request
    before may have got through: the API may be at that one still, and the order come to be.
    """
    asked = ApiRequest(
        method="POST",
        path=path,
        query={"wait": wait},
        body=body,
        wait=DEFAULT_WAIT_S if wait is None else wait,
    )
    until = time.monotonic() + patience
    pause = FIRST_RETRY_INTERVAL_S
    order: models.OrderSnapshot | None = None
    sent = False
    while True:
        failure: Exception | None = None
        retry_after = 0.0
        try:
            answer = yield from _answer_to(asked)
            order = decode_answer(answer, models.OrderSnapshot)
            if answer.status_code != 202:
                return order
            sent = True
        except Unreachable as error:
            failure, sent = error, sent or error.sent
        except UnexpectedAnswer as error:
            failure, sent = error, True
        except ApiError as error:
            failure = error
            if error.order is not None:
                order = error.order
                if order.final:
                    raise
            sent = sent or error.order is not None or error.status >= 500
            if not error.retryable and error.status < 500:
                if sent and is_new:
                    raise OutcomeUnsettled(ticket_id, order) from error
                raise
            retry_after = error.retry_after or 0.0
        rest = max(retry_after, pause * random.uniform(0.75, 1.25))  # noqa: S311 - clients must not march in step
        if time.monotonic() + rest > until:
            if failure is not None and not sent:
                raise failure
            raise OutcomeUnsettled(ticket_id, order) from failure
        yield rest
        pause = min(2 * pause, MAX_RETRY_INTERVAL_S)


def get_order(order_id: str) -> Call[models.OrderHistory]:
    """Returns an order and the steps of its life. Raises `ApiError` (`ORDER_NOT_FOUND`),
    `Unreachable`."""
    return _get(models.OrderHistory, url_path("orders", order_id))


def list_orders(
    user_id: str,
    *,
    state: list[str] | None = None,
    account: str | None = None,
    symbol: str | None = None,
    client_order_id: str | None = None,
    since: datetime | date | None = None,
    until: datetime | date | None = None,
    cursor: str | None = None,
    limit: int = 100,
) -> Call[models.OrderListPage]:
    """Lists a page of orders, the newest first: at most `limit` (1 to 500) behind `cursor`.

    `state`: any of these, or `open` and `final`. `since` and `until`: accepted at or after the one,
    and before the other; a time has a zone, and a date is a day of the API's home zone, of
    which all counts. Raises `ApiError`, `Unreachable`.
    """
    query: dict[str, Any] = {"state": state, "account": account, "symbol": symbol}
    query |= {"client_order_id": client_order_id, "from": _iso(since), "to": _iso(until)}
    path = url_path("users", user_id, "orders")
    return _get(models.OrderListPage, path, {**query, "cursor": cursor, "limit": limit})


def _iso(at: datetime | date | None) -> str | None:
    return None if at is None else at.isoformat()


def get_worker(user_id: str) -> Call[models.WorkerSnapshot]:
    """Returns the user's worker from both sides. Raises `ApiError`, `Unreachable`."""
    return _get(models.WorkerSnapshot, url_path("users", user_id, "worker"))


def start_worker(
    user_id: str, *, wait: float = 30.0, reason: str = "requested"
) -> Call[models.StartedWorker | None]:
    """Makes the user's worker Active, if it is not; None when that takes longer than `wait` (0 to
    60 s).

    Sent once; safe to repeat. Raises `ApiError`, `Unreachable`.
    """
    path = url_path("users", user_id, "worker", "start")
    reply = yield from request("POST", path, body={"reason": reason}, wait=wait)
    return msgspec.convert(reply.body, models.StartedWorker) if reply.done else None


def stop_worker(user_id: str, *, reason: str = "requested") -> Call[None]:
    """Asks the worker to finish its order, close its sessions and end; it continues by itself.

    Sent once; safe to repeat. Raises `ApiError`, `Unreachable`.
    """
    path = url_path("users", user_id, "worker", "stop")
    yield from request("POST", path, body={"reason": reason})


def follow_orders(
    user_id: str, after: int | None = None
) -> Subscription[models.OpenOrders | models.OrderSnapshot]:
    """Changes of the user's orders, endlessly: the open orders, or with `after` what came behind
    that event.

    An event's data are `OpenOrders`, or the `OrderSnapshot` of one changed order. A lost stream is
    opened again behind its last event: none is left out, one may come twice. Raises `ApiError` when
    the API refuses the stream, also later; and what went wrong when it cannot be opened the first
    time.
    """
    kinds = {"orders": models.OpenOrders, "order": models.OrderSnapshot}
    return Subscription(url_path("users", user_id, "orders", "events"), kinds, after)


def follow_worker(
    user_id: str, after: int | None = None
) -> Subscription[models.PresentWorkerState | models.StateTransition]:
    """Changes of the state of the user's worker; without `after` the present state comes first.

    An event's data are a `PresentWorkerState` or a `StateTransition`; otherwise as `follow_orders`.
    """
    kinds = {"state": models.PresentWorkerState, "transition": models.StateTransition}
    return Subscription(url_path("users", user_id, "worker", "events"), kinds, after)


def follow(path: str, after: int | None = None) -> Subscription[Any]:
    """Follows any event stream of the API, by its path behind `/v1`, as `follow_orders` does; data
    are decoded JSON."""
    return Subscription(path, None, after)
