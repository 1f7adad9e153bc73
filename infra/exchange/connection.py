"""A client's TCP connection to the exchange.
It speaks lines of JSON, and no input can end the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec
import structlog

from infra.exchange.behaviour import FaultPoint
from infra.exchange.exchange import PaperExchange
from infra.exchange.limits import ExchangeCallKind
from infra.exchange.records import LedgerOrder, LedgerSession
from worker_runtime.brokers.paper.wire import (
    Cancel,
    ClientRequest,
    ExchangeOrder,
    ExchangeOrderChanged,
    ExchangePing,
    ExchangeReply,
    GetBalance,
    ListExchangeInstruments,
    ListOrders,
    ListPositions,
    Login,
    Logout,
    Place,
    Replace,
    SessionEnded,
)
from worker_runtime.protocol.errors import BerthError, MalformedMessage, OrderRejected, SessionDown
from worker_runtime.protocol.messages import OrderState, decode, encode

#: Most bytes of a line. A request has about 300.
MAX_LINE_BYTES = 64 * 1024
#: Most unsent bytes: a client that does not read its answers is cut off.
MAX_UNSENT_BYTES = 1024 * 1024
#: Seconds a connection may take for its login.
LOGIN_TIMEOUT_S = 10.0
#: Reasons of sessions that ended without a logout.
HUNG_UP = "the client hung up"
CONNECTION_LOST = "the connection was lost"

_log = structlog.get_logger()


class _NumberedLine(msgspec.Struct):
    """The part of a malformed request that an error reply needs."""

    id: int = 0


class ExchangeConnection(asyncio.Protocol):
    """A client's connection, which has a session after its login."""

    def __init__(self, exchange: PaperExchange, connections: set[ExchangeConnection]) -> None:
        self._exchange = exchange
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._session: LedgerSession | None = None
        self._address = ""
        self._buffer = bytearray()
        #: Replies to the requests in hand, sent together: each write costs a system call here and a
        #: wake-up in the client.
        self._pending: list[bytes] | None = None
        self._pending_bytes = 0
        self._login_timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - create_server makes no other
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        self._connections.add(self)
        self._login_timer = self._loop.call_later(LOGIN_TIMEOUT_S, self._refuse_late_login)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._log_out(CONNECTION_LOST if exc else HUNG_UP)
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._pending = []
        try:
            self._read_lines(data)
        finally:
            self._flush()
            self._pending = None

    def _read_lines(self, data: bytes) -> None:
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        for line in lines:
            if self._transport is None or self._transport.is_closing():
                return
            if len(line) > MAX_LINE_BYTES:
                break
            if line.strip():
                self._receive(bytes(line))
        else:
            if len(rest) <= MAX_LINE_BYTES:
                return
        self._answer(
            ExchangeReply(
                id=0,
                error=MalformedMessage.code,
                detail=f"a line has more than {MAX_LINE_BYTES} bytes",
            )
        )
        self.close()

    # --- Listener ---------------------------------------------------------------------------------

    def deliver(self, event: ExchangeOrderChanged) -> None:
        self._send(event)

    def end(self, reason: str, *, abrupt: bool) -> None:
        """Ends the session; `abrupt` breaks the connection without a message."""
        if abrupt:
            self._cut()
        else:
            self._send(SessionEnded(reason=reason))
            self.close()

    def close(self) -> None:
        self._log_out("the exchange closed the connection")
        self._flush()
        if self._transport is not None:
            self._transport.close()

    # --- requests ---------------------------------------------------------------------------------

    def _receive(self, line: bytes) -> None:
        try:
            request: ClientRequest = decode(line, ClientRequest)
        except MalformedMessage as error:
            self._answer(ExchangeReply(id=_id_of(line), error=error.code, detail=error.detail))
            return
        try:
            self._handle(request)
        except BerthError as error:
            self._answer(ExchangeReply(id=request.id, error=error.code, detail=error.detail))
        except Exception:
            # The boundary of one request: the other sessions must continue.
            _log.exception("exchange.request_failed", request=type(request).__name__)
            self._answer(
                ExchangeReply(id=request.id, error=BerthError.code, detail="the exchange failed")
            )

    def _handle(self, request: ClientRequest) -> None:
        if isinstance(request, Login):
            self._log_in(request)
            return
        session = self._session
        if session is None:
            raise SessionDown("log in first")
        match request:
            case Place():
                self._place(session, request)
            case Cancel() | Replace():
                self._change(session, request)
            case GetBalance() | ListOrders() | ListPositions():
                self._query(session, request)
            case ListExchangeInstruments():
                self._list_instruments(session, request)
            case ExchangePing():
                if not self._exchange.accounts.fault_hits(session.account, FaultPoint.LOST_PONG):
                    self._answer(ExchangeReply(id=request.id))
            case Logout():
                self._log_out("logged out")
                self._answer(ExchangeReply(id=request.id))
                self.close()

    def _log_in(self, request: Login) -> None:
        if self._session is not None:
            raise MalformedMessage("this connection is logged in already")
        if request.check_only:
            self._exchange.sessions.maintenance.check()
            self._exchange.accounts.check_login(request)
            self._answer(ExchangeReply(id=request.id))
            return
        if self._exchange.accounts.fault_hits(request.account, FaultPoint.LOST_LOGIN):
            return
        self._after(
            self._exchange.accounts.login_latency(request.account),
            lambda: self._finish_login(request),
        )

    def _finish_login(self, request: Login) -> None:
        if self._transport is None or self._transport.is_closing() or self._session is not None:
            return
        try:
            session = self._exchange.sessions.login(request, self, self._address)
        except BerthError as error:
            _log.info("exchange.login_refused", account=request.account, code=error.code)
            self._answer(ExchangeReply(id=request.id, error=error.code, detail=error.detail))
            return
        self._session = session
        if self._login_timer is not None:
            self._login_timer.cancel()
        _log.info(
            "exchange.login",
            account=session.account,
            session=session.session_id,
            client=session.client,
        )
        self._answer(ExchangeReply(id=request.id, session_id=session.session_id))

    def _place(self, session: LedgerSession, request: Place) -> None:
        exchange, account = self._exchange, session.account
        if exchange.accounts.fault_hits(account, FaultPoint.LOST_REQUEST):
            self._cut()
            return
        exchange.sessions.admit(session, ExchangeCallKind.ORDER)
        behaviour = exchange.accounts.behaviour(account)
        taken = exchange.place(session, request)
        if exchange.accounts.fault_hits(account, FaultPoint.DROP_BEFORE_ACK):
            self._cut()
            exchange.event_feed.publish(account, taken.events)
            return
        reply = _reply_to_place(request.id, taken.sent)
        lost = exchange.accounts.fault_hits(account, FaultPoint.LOST_ACK)
        late = 0.0
        if not lost and exchange.accounts.fault_hits(account, FaultPoint.LATE_ACK):
            late = behaviour.late_ack_ms / 1000

        def report() -> None:
            if not lost:
                self._after(late, lambda: self._answer(reply))
            exchange.event_feed.publish(account, taken.events)

        self._after(behaviour.latency_ms / 1000, report)

    def _change(self, session: LedgerSession, request: Cancel | Replace) -> None:
        fault_hits, account = self._exchange.accounts.fault_hits, session.account
        self._exchange.accounts.received_changes[account] += 1
        if fault_hits(account, FaultPoint.LOST_CHANGE):
            return
        self._exchange.sessions.admit(session, ExchangeCallKind.ORDER)
        if delay := self._exchange.accounts.behaviour(account).change_delay_ms:
            order = self._exchange.working_order(account, request.broker_order_id)
            self._after(delay / 1000, lambda: self._apply_late(account, request))
        else:
            order = self._apply(account, request)
        if fault_hits(account, FaultPoint.DROP_IN_CHANGE):
            self._cut()
        elif not fault_hits(account, FaultPoint.LOST_CHANGE_ACK):
            self._answer(ExchangeReply(id=request.id, order=order.as_sent()))

    def _apply(self, account: str, request: Cancel | Replace) -> LedgerOrder:
        if isinstance(request, Cancel):
            return self._exchange.cancel(
                request.broker_order_id, "cancelled by the client", account
            )
        return self._exchange.replace(account, request)

    def _apply_late(self, account: str, request: Cancel | Replace) -> None:
        with suppress(OrderRejected):  # it has ended meanwhile, or has filled too much
            self._apply(account, request)

    def _query(
        self, session: LedgerSession, request: GetBalance | ListOrders | ListPositions
    ) -> None:
        exchange, account = self._exchange, session.account
        if exchange.accounts.fault_hits(account, FaultPoint.DROP_IN_QUERY):
            self._cut()
            return
        if exchange.accounts.fault_hits(account, FaultPoint.LOST_QUERY):
            return
        exchange.sessions.admit(session, ExchangeCallKind.QUERY)
        match request:
            case GetBalance():
                self._answer(ExchangeReply(id=request.id, balance=exchange.balance(account)))
            case ListOrders():
                listed, coverage = exchange.listing(session)
                orders = [order.as_sent() for order in listed]
                self._answer(ExchangeReply(id=request.id, orders=orders, coverage=coverage))
            case ListPositions():
                self._answer(ExchangeReply(id=request.id, positions=exchange.positions(account)))

    def _list_instruments(self, session: LedgerSession, request: ListExchangeInstruments) -> None:
        """Answers a page. Only the first one counts as a query."""
        exchange, account = self._exchange, session.account
        if exchange.accounts.fault_hits(account, FaultPoint.DROP_IN_QUERY):
            self._cut()
            return
        if exchange.accounts.fault_hits(account, FaultPoint.LOST_QUERY):
            return
        if not request.after:
            exchange.sessions.admit(session, ExchangeCallKind.QUERY)
        page = exchange.instruments.page(request.after, request.limit)
        self._answer(ExchangeReply(id=request.id, instruments=page))

    # --- inside -----------------------------------------------------------------------------------

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls at once without a delay, since a timer would cost a turn of the loop."""
        if seconds > 0:
            self._loop.call_later(seconds, call)
        else:
            call()

    def _refuse_late_login(self) -> None:
        self._answer(
            ExchangeReply(
                id=0, error=SessionDown.code, detail=f"no login within {LOGIN_TIMEOUT_S:.0f} s"
            )
        )
        self.close()

    def _log_out(self, reason: str) -> None:
        if self._login_timer is not None:
            self._login_timer.cancel()
        if self._session is not None:
            self._exchange.sessions.logout(self._session.session_id, reason)
            _log.info("exchange.logout", session=self._session.session_id, reason=reason)
            self._session = None

    def _cut(self) -> None:
        self._log_out("the line was cut")
        self._flush()
        if self._transport is not None:
            self._transport.abort()

    def _answer(self, reply: ExchangeReply) -> None:
        self._send(reply)

    def _send(self, message: ExchangeReply | ExchangeOrderChanged | SessionEnded) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._pending is not None:
            line = encode(message)
            self._pending.append(line)
            self._pending_bytes += len(line)
            if self._pending_bytes > MAX_LINE_BYTES:
                self._flush()
        else:
            self._write(encode(message) + b"\n")

    def _flush(self) -> None:
        """Sends the pending replies."""
        if self._pending:
            lines, self._pending = self._pending, []
            self._pending_bytes = 0
            self._write(b"\n".join([*lines, b""]))

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            _log.warning("exchange.client_does_not_read")
            self._cut()


def _reply_to_place(request_id: int, order: ExchangeOrder) -> ExchangeReply:
    if order.state is OrderState.REJECTED:
        return ExchangeReply(
            id=request_id, error=OrderRejected.code, detail=order.reason or "", order=order
        )
    return ExchangeReply(id=request_id, order=order)


def _id_of(line: bytes) -> int:
    try:
        return msgspec.json.decode(line, type=_NumberedLine).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
