"""The paper exchange's adapter."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from decimal import Decimal

from worker_runtime.brokers.paper_connection import ConnectionLost, NoReply, NothingSent, PaperConnection
from worker_runtime.brokers.port import Listing, OnOrderChanged
from worker_runtime.process.log import Log
from worker_runtime.protocol.errors import (
    BrokerMaintenance,
    BrokerUnreachable,
    LoginLimited,
    LoginRejected,
    MalformedMessage,
    OrderRejected,
    OutcomeUnknown,
    RateLimited,
    SessionDown,
    from_code,
)
from worker_runtime.protocol.exchange import (
    Balance,
    Cancel,
    ClientRequest,
    ExchangeOrder,
    ExchangePing,
    ExchangeReply,
    GetBalance,
    ListOrders,
    ListPositions,
    Login,
    Logout,
    Place,
    Position,
    Replace,
)
from worker_runtime.protocol.messages import Credentials, PlaceOrder

#: Seconds `close()` waits for the exchange to confirm the logout; the port allows a second in all.
_LOGOUT_WAIT = 0.4
#: Error codes that say that a place, cancel or replace did nothing; any other leaves the outcome open.
_NOT_TAKEN = frozenset(
    error.code for error in (OrderRejected, SessionDown, MalformedMessage, RateLimited, BrokerMaintenance)
)
_LOGIN_ERRORS = frozenset({LoginRejected.code, LoginLimited.code, BrokerMaintenance.code})


class PaperBroker:
    """One session with the paper exchange at `address` (`host:port`), for one of its accounts."""

    def __init__(self, address: str, account: str, client: str, on_order: OnOrderChanged) -> None:
        self._address = address
        self._account = account
        self._client = client
        self._on_order = on_order
        self._log = Log(broker="paper", account=account)
        self._link: PaperConnection | None = None
        self._closed = False

    def login(self, credentials: Credentials, timeout: float) -> None:
        """May be repeated after a failure. Raises `LoginRejected`, `LoginLimited`, `BrokerUnreachable`."""
        if self._closed:
            raise SessionDown("this broker session was closed")
        if self._link is not None:
            self._link.drop("a new login replaces this session")
        deadline = time.monotonic() + timeout
        link = self._link = PaperConnection(self._connect(timeout), self._on_order, self._log)

        def request(number: int) -> Login:
            return Login(
                id=number,
                account=self._account,
                api_key=credentials.api_key,
                secret_key=credentials.secret_key,
                person_id=credentials.person_id,
                client=self._client,
            )

        try:
            reply = link.call(request, deadline)
        except (NothingSent, ConnectionLost, NoReply) as error:
            link.drop("the login failed")
            raise BrokerUnreachable(f"login: {error}") from None
        if reply.error is None:
            return
        link.drop("the login was refused")
        if reply.error in _LOGIN_ERRORS:
            raise from_code(reply.error, reply.detail)
        raise BrokerUnreachable(f"login: {reply.error}: {reply.detail}")

    def place(self, order: PlaceOrder, timeout: float) -> ExchangeOrder:
        if timeout <= 0:
            raise OrderRejected("no time was left to send the order; it was not sent")

        def request(number: int) -> Place:
            return Place(
                id=number,
                symbol=order.symbol,
                side=order.side,
                quantity=order.quantity,
                price_type=order.price_type,
                price=order.price,
                time_in_force=order.time_in_force,
                tag=order.tag,
                client_note=order.order_id,
            )

        return self._change(request, timeout)

    def queries_before_change(self, broker_order_id: str) -> bool:
        return False

    def cancel(self, broker_order_id: str, timeout: float) -> ExchangeOrder:
        return self._change(lambda number: Cancel(id=number, broker_order_id=broker_order_id), timeout)

    def replace(
        self, broker_order_id: str, quantity: int | None, price: Decimal | None, timeout: float
    ) -> ExchangeOrder:
        return self._change(
            lambda number: Replace(
                id=number, broker_order_id=broker_order_id, quantity=quantity, price=price
            ),
            timeout,
        )

    def orders(self, timeout: float) -> Listing:
        reply = self._ask(lambda number: ListOrders(id=number), timeout)
        coverage = reply.coverage
        if coverage is None or not coverage.all_sessions:
            return Listing(reply.orders)
        behind, reaches = coverage.behind_ms / 1000, coverage.reaches_ms / 1000
        return Listing(reply.orders, behind=behind, reaches=reaches, positions_agree=True)

    def positions(self, timeout: float) -> list[Position]:
        return self._ask(lambda number: ListPositions(id=number), timeout).positions

    def balance(self, timeout: float) -> Balance:
        balance = self._ask(lambda number: GetBalance(id=number), timeout).balance
        if balance is None:
            raise BrokerUnreachable("the exchange answered without a balance")
        return balance

    def ping(self, timeout: float) -> None:
        self._ask(lambda number: ExchangePing(id=number), timeout)

    def alive(self) -> bool:
        link = self._link
        return link is not None and link.down_reason is None

    def close(self) -> None:
        self._closed = True
        link, self._link = self._link, None
        if link is None:
            return
        try:
            link.call(lambda number: Logout(id=number), time.monotonic() + _LOGOUT_WAIT)
        except (NothingSent, ConnectionLost, NoReply) as error:
            self._log.debug("paper.logout_unanswered", reason=str(error))
        link.drop("closed")

    def _connect(self, timeout: float) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        try:
            return socket.create_connection((host, int(port)), timeout=max(timeout, 0.001))
        except (OSError, ValueError, OverflowError) as error:
            raise BrokerUnreachable(
                f"the paper exchange at {self._address!r}: {type(error).__name__}"
            ) from None

    def _connected(self) -> PaperConnection:
        if self._link is None:
            raise SessionDown("not logged in")
        return self._link

    def _change(self, request: Callable[[int], ClientRequest], timeout: float) -> ExchangeOrder:
        """Makes a call that may take effect even if no answer comes."""
        try:
            reply = self._connected().call(request, time.monotonic() + timeout)
        except NothingSent as error:
            raise SessionDown(str(error)) from None
        except (ConnectionLost, NoReply) as error:
            raise OutcomeUnknown(str(error)) from None
        if reply.error in _NOT_TAKEN:
            raise from_code(str(reply.error), reply.detail)
        if reply.error is not None or reply.order is None:
            raise OutcomeUnknown(f"{reply.error}: {reply.detail}")
        return reply.order

    def _ask(self, request: Callable[[int], ClientRequest], timeout: float) -> ExchangeReply:
        """Makes a call that changes nothing, so that a missing answer leaves nothing open."""
        try:
            reply = self._connected().call(request, time.monotonic() + timeout)
        except (NothingSent, ConnectionLost) as error:
            raise SessionDown(str(error)) from None
        except NoReply as error:
            raise BrokerUnreachable(str(error)) from None
        if reply.error is not None:
            raise from_code(reply.error, reply.detail)
        return reply
