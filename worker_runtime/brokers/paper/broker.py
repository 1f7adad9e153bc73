"""The paper exchange's adapter: one socket, one reader thread,
calls that wait for the reply to their id.

Three failures say what is known of a request: nothing of it left this process, the connection broke
after something may have left, or no answer came in time.
"""

import select
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from queue import Empty, SimpleQueue

import msgspec

from worker_runtime.brokers.paper import wire
from worker_runtime.brokers.port import (
    BrokerOrderTerms,
    ConnectionKey,
    Instrument,
    Listing,
    OnOrderChanged,
)
from worker_runtime.process.log import Log
from worker_runtime.protocol.bounds import round_price
from worker_runtime.protocol.broker_reports import Balance, BrokerOrder, OrderChanged, Position
from worker_runtime.protocol.errors import (
    BrokerError,
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
from worker_runtime.protocol.messages import Credentials
from worker_runtime.protocol.requests import ConfirmedQuantityChange
from worker_runtime.protocol.sockets import watch_peer

#: Seconds `close()` waits for the exchange to confirm the logout; the port allows a second in all.
_LOGOUT_TIMEOUT_S = 0.4
#: Error codes that say that a place, cancel or replace did nothing;
#: any other leaves the outcome open.
_NOT_TAKEN_CODES = frozenset(
    error.code
    for error in (OrderRejected, SessionDown, MalformedMessage, RateLimited, BrokerMaintenance)
)
_LOGIN_ERROR_CODES = frozenset({LoginRejected.code, LoginLimited.code, BrokerMaintenance.code})


#: Bytes. A day's list of 10,000 orders with fills takes about 6 MB;
#: a longer line is no exchange of ours.
_MAX_LINE_BYTES = 16 * 1024 * 1024
#: Ids of events and fills that are remembered, to drop repeats.
_MAX_REMEMBERED_IDS = 4096
#: Seconds to wait for the reader thread to end.
_READER_END_TIMEOUT_S = 0.4
#: The fields that the exchange takes of our request as they are.
_SENT_FIELDS = (
    "symbol",
    "side",
    "quantity",
    "price_type",
    "price",
    "time_in_force",
    "lot",
    "condition",
    "open_close",
    "tag",
)

#: Makes a request from its `id`.
MakeRequest = Callable[..., wire.ClientRequest]

_decoder: msgspec.json.Decoder[wire.ServerMessage] = msgspec.json.Decoder(wire.ServerMessage)
_encoder = msgspec.json.Encoder()


def read_order(order: wire.ExchangeOrder) -> BrokerOrder:
    """Returns an order of the exchange in the words of the port."""
    return BrokerOrder(
        broker_order_id=order.broker_order_id,
        tag=order.tag,
        symbol=order.symbol,
        side=order.side,
        quantity=order.quantity,
        price_type=order.price_type,
        price=order.price,
        time_in_force=order.time_in_force,
        state=order.state,
        fills=order.fills,
        reason=order.reason,
    )


class NothingSent(Exception):
    """Not one byte of the request left this process."""


class ConnectionLost(Exception):
    """The connection broke after the request may have left."""


class NoReply(Exception):
    """No reply came in time."""


class PaperConnection:
    """A connected socket; `on_order` is called from its reader thread."""

    def __init__(self, link: socket.socket, on_order: OnOrderChanged, log: Log) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        watch_peer(link)
        link.settimeout(None)
        self._socket = link
        self._on_order = on_order
        self._log = log
        self._sending = threading.Lock()
        self._next_id = 0
        self._waiting: dict[int, SimpleQueue[wire.ExchangeReply | None]] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        #: By symbol, the price of this session's last fill.
        self.last_prices: dict[str, Decimal] = {}
        self.down_reason: str | None = None
        self._buffer = bytearray()
        self._reader = threading.Thread(target=self._read, name="paper-reader", daemon=True)
        self._reader.start()

    def call(self, make: MakeRequest, deadline: float) -> wire.ExchangeReply:
        """Sends what `make` gives and waits for its reply until `deadline` (time.monotonic).

        Raises `NothingSent`, `ConnectionLost` or `NoReply`.
        """
        answer: SimpleQueue[wire.ExchangeReply | None] = SimpleQueue()
        if not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise NothingSent("another request is still being sent")
        try:
            self._next_id += 1
            number = self._next_id
            self._waiting[number] = answer
            # After the entry, so that a reader that ends now either sees the entry or is seen here.
            if self.down_reason is not None:
                raise NothingSent(self.down_reason)
            self._send(_encoder.encode(make(id=number)) + b"\n", deadline)
        except BaseException:
            self._waiting.pop(number, None)
            raise
        finally:
            self._sending.release()
        try:
            reply = answer.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            if self._waiting.pop(number, None) is not None:
                raise NoReply("no answer in time") from None
            reply = answer.get()  # the reader took it just now, and is about to put it here
        if reply is None:
            raise ConnectionLost(self.down_reason or "the connection was lost")
        return reply

    def drop(self, reason: str) -> None:
        """Closes the socket and ends the reader; may be called twice, and from `on_order`."""
        self._go_down(reason)
        if threading.get_ident() != self._reader.ident:  # which cannot end before this returns
            self._reader.join(_READER_END_TIMEOUT_S)

    def _send(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        try:
            while rest:
                try:
                    rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self._wait_writable(deadline)
        except (OSError, ValueError) as error:
            # poll's ValueError: the reader has just closed the socket.
            self._go_down(f"the connection was lost: {type(error).__name__}")
            # The kernel refused the very first byte: the peer cannot have seen anything.
            kind = NothingSent if len(rest) == len(data) else ConnectionLost
            raise kind(self.down_reason) from None

    def _wait_writable(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            # Half a line may be on its way; nothing can follow it on this connection.
            raise TimeoutError

    def _read(self) -> None:
        while self._receive():
            pass
        self._socket.close()

    def _receive(self) -> bool:
        """Waits for bytes and handles them; false at the end of the connection."""
        try:
            data = self._socket.recv(65536)
            if data and self._feed(data):
                return True
            reason = (
                "the exchange sent a line without end"
                if data
                else "the exchange closed the connection"
            )
        except OSError as error:
            reason = f"the connection was lost: {type(error).__name__}"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = f"the exchange sent what cannot be read: {error}"
        except Exception as error:
            # The boundary of what was received:
            # waiting calls must end now, not after their whole timeout.
            reason = "the reader failed"
            self._log.crash("paper.reader_failed", error)
        self._go_down(reason)
        return False

    def _feed(self, data: bytes) -> bool:
        """Passes on the complete lines; false if a line has no end."""
        self._buffer += data
        if b"\n" not in data:
            return len(self._buffer) <= _MAX_LINE_BYTES
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._dispatch(_decoder.decode(line))
        return True

    def _dispatch(self, message: wire.ServerMessage) -> None:
        if isinstance(message, wire.ExchangeReply):
            waiting = self._waiting.pop(message.id, None)
            if waiting is not None:
                waiting.put(message)
            elif message.order is not None:
                # The caller has given up: the late answer is passed on like any other change.
                order = message.order
                event_id = f"late-{order.broker_order_id}-{order.state.value}"
                self._report(OrderChanged(event_id=event_id, order=read_order(order)))
        elif isinstance(message, wire.ExchangeOrderChanged):
            self._report(
                OrderChanged(
                    event_id=message.event_id, order=read_order(message.order), fill=message.fill
                )
            )
        elif isinstance(message, wire.SessionEnded):
            self.down_reason = f"the exchange ended the session: {message.reason}"

    def _report(self, change: OrderChanged) -> None:
        """Passes a change on once. A repeated fill is recognised
        by its fill id, whatever event repeats it."""
        if change.fill is not None:
            self.last_prices[change.order.symbol] = change.fill.price
        key = (
            f"fill {change.fill.fill_id}" if change.fill is not None else f"event {change.event_id}"
        )
        if key in self._seen:
            return
        self._seen[key] = None
        if len(self._seen) > _MAX_REMEMBERED_IDS:
            self._seen.popitem(last=False)
        try:
            self._on_order(change)
        except Exception as error:  # the boundary to the session's code; the reader must live on
            self._log.crash("paper.on_order_failed", error)

    def _go_down(self, reason: str) -> None:
        if self.down_reason is None:
            self.down_reason = reason
        try:
            # Wakes the reader, which handles what came before, and closes the socket.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            self._log.debug("paper.already_disconnected")
        for number in list(self._waiting):
            waiting = self._waiting.pop(number, None)
            if waiting is not None:
                waiting.put(None)


def open_session(
    key: ConnectionKey, client: str, on_order: OnOrderChanged, options: Mapping[str, str]
) -> "PaperBroker":
    """Returns an unconnected session. Raises `BrokerError` if the exchange's address is missing."""
    address = options.get("address") or options.get("paper_exchange", "")
    if not address:
        raise BrokerError("this worker does not know where the paper exchange is")
    return PaperBroker(address, key.at_broker, client, on_order)


class PaperBroker:
    """A session with the paper exchange at `address` (`host:port`), for one of its accounts."""

    def __init__(self, address: str, account: str, client: str, on_order: OnOrderChanged) -> None:
        self._address = address
        self._account = account
        self._client = client
        self._on_order = on_order
        self._log = Log(broker="paper", account=account)
        self._link: PaperConnection | None = None
        self._closed = False

    def login(self, credentials: Credentials, timeout: float) -> None:
        """Logs in; may be repeated after a failure. Raises `LoginRejected`, `LoginLimited` or
        `BrokerUnreachable`."""
        if self._closed:
            raise SessionDown("this broker session was closed")
        if self._link is not None:
            self._link.drop("a new login replaces this session")
        deadline = time.monotonic() + timeout
        link = self._link = PaperConnection(self._connect(timeout), self._on_order, self._log)

        request = partial(
            wire.Login,
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
        if reply.error in _LOGIN_ERROR_CODES:
            raise from_code(reply.error, reply.detail)
        raise BrokerUnreachable(f"login: {reply.error}: {reply.detail}")

    def place(self, order: BrokerOrderTerms, timeout: float) -> BrokerOrder:
        if timeout <= 0:
            raise OrderRejected("no time was left to send the order; it was not sent")
        terms = {name: getattr(order, name) for name in _SENT_FIELDS}
        request = partial(wire.Place, client_note=order.order_id, **terms)
        return self._change(request, timeout)

    def queries_before_change(self, broker_order_id: str, *, quantity: bool = False) -> bool:
        return False

    def cancel(self, broker_order_id: str, timeout: float) -> BrokerOrder:
        return self._change(partial(wire.Cancel, broker_order_id=broker_order_id), timeout)

    def replace(
        self,
        broker_order_id: str,
        quantity: int | None,
        price: Decimal | None,
        timeout: float,
        confirmed: Sequence[ConfirmedQuantityChange] = (),
    ) -> BrokerOrder:
        request = partial(
            wire.Replace, broker_order_id=broker_order_id, quantity=quantity, price=price
        )
        return self._change(request, timeout)

    def orders(self, timeout: float) -> Listing:
        reply = self._ask(wire.ListOrders, timeout)
        coverage = reply.coverage
        if coverage is None or not coverage.all_sessions:
            return Listing([read_order(order) for order in reply.orders])
        behind, reaches = coverage.behind_ms / 1000, coverage.reaches_ms / 1000
        orders = [read_order(order) for order in reply.orders]
        return Listing(orders, behind=behind, reaches=reaches, positions_agree=True)

    def positions(self, timeout: float) -> list[Position]:
        positions = self._ask(wire.ListPositions, timeout).positions
        return [
            Position(
                symbol=position.symbol,
                quantity=position.quantity,
                # An average cost such as 1661/3 comes with 28 digits.
                average_price=round_price(position.average_price),
                odd_shares=position.odd_shares,
                condition=position.condition,
            )
            for position in positions
        ]

    def balance(self, timeout: float) -> Balance:
        balance = self._ask(wire.GetBalance, timeout).balance
        if balance is None:
            raise BrokerUnreachable("the exchange answered without a balance")
        return Balance(
            currency=balance.currency,
            cash=round_price(balance.cash),
            available=round_price(balance.available),
        )

    def instruments(self, timeout: float) -> Iterator[Instrument]:
        """Yields the exchange's list, page by page. If it changes meanwhile, new instruments may be
        missing; no code comes twice."""
        after = ""
        while True:
            page = self._ask(partial(wire.ListExchangeInstruments, after=after), timeout)
            if page.instruments is None:
                raise BrokerUnreachable("the exchange answered without instruments")
            yield from page.instruments.instruments
            following = page.instruments.next_after
            if not following:
                return
            if following <= after:
                raise BrokerUnreachable("the exchange repeated a page of instruments")
            after = following

    def ping(self, timeout: float) -> None:
        self._ask(wire.ExchangePing, timeout)

    def reference_price(self, symbol: str) -> Decimal | None:
        """Returns the price of the session's last fill: the exchange has no reference price."""
        return self._link.last_prices.get(symbol) if self._link is not None else None

    def alive(self) -> bool:
        link = self._link
        return link is not None and link.down_reason is None

    def close(self) -> None:
        self._closed = True
        link, self._link = self._link, None
        if link is None:
            return
        try:
            link.call(wire.Logout, time.monotonic() + _LOGOUT_TIMEOUT_S)
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

    def _change(self, request: MakeRequest, timeout: float) -> BrokerOrder:
        """Makes a call that may take effect even if no answer comes."""
        try:
            reply = self._connected().call(request, time.monotonic() + timeout)
        except NothingSent as error:
            raise SessionDown(str(error)) from None
        except (ConnectionLost, NoReply) as error:
            raise OutcomeUnknown(str(error)) from None
        if reply.error in _NOT_TAKEN_CODES:
            raise from_code(str(reply.error), reply.detail)
        if reply.error is not None or reply.order is None:
            raise OutcomeUnknown(f"{reply.error}: {reply.detail}")
        return read_order(reply.order)

    def _ask(self, request: MakeRequest, timeout: float) -> wire.ExchangeReply:
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
