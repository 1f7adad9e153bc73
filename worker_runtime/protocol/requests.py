"""The requests in a user's queue, the switch (`trading:switch:{user}`) that says which orders may
pass, and the messages of the control list.

A request is framed as `deadline ms|request id|MAC|payload`, so that Lua can read the deadline. The
MAC is made under the user's request key and covers the other parts and the user: who can only write
to Valkey can neither make a request nor give a genuine one another deadline. All go through one
FIFO, so that no request overtakes the order that it means. (To cancel a queued order, the API
removes its request with `resolve_overdue.lua`.) Quantities are lots, prices are decimal strings,
times are Unix milliseconds by Valkey's clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from worker_runtime.protocol import messages
from worker_runtime.protocol.authentication import MessageKeys, sign, verify
from worker_runtime.protocol.bounds import (
    LIST_BOUNDS,
    Counter,
    Id,
    Lots,
    SpanMs,
    TimeMs,
    Word,
    check_prices,
)
from worker_runtime.protocol.broker_reports import Balance, BrokerOrder, Position
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.instruments import MAX_INSTRUMENTS_PER_PAGE, CodeOrNone, MarketOrAll
from worker_runtime.protocol.order_terms import OrderLot


@dataclass(frozen=True, slots=True)
class Frame:
    """An item of a request queue. `raw` is what `answer.lua` and `withdraw.lua` look for."""

    raw: bytes
    deadline_ms: int
    request_id: str
    mac: str
    payload: bytes

    def is_authentic(self, request_keys: MessageKeys, user_id: str) -> bool:
        """Returns True if a holder of the user's request key made it, with this deadline."""
        parts = _signed_parts(user_id, self.request_id, self.deadline_ms, self.payload)
        return verify(request_keys, self.mac, *parts)


def sign_request(
    request_keys: MessageKeys, user_id: str, request_id: str, deadline_ms: int, payload: bytes
) -> str:
    """Returns the MAC of a request."""
    return sign(request_keys, *_signed_parts(user_id, request_id, deadline_ms, payload))


def _signed_parts(
    user_id: str, request_id: str, deadline_ms: int, payload: bytes
) -> tuple[bytes, ...]:
    return b"request/1", user_id.encode(), request_id.encode(), b"%d" % deadline_ms, payload


def parse_frame(raw: bytes) -> Frame:
    """Splits an item into its parts. Raises `MalformedMessage` if it is no frame."""
    parts = raw.split(b"|", 3)
    # 15 digits of milliseconds reach the year 33658;
    # `int` would raise ValueError for thousands of them.
    if (
        len(parts) != 4
        or not parts[0].isdigit()
        or len(parts[0]) > 15
        or not (parts[1] + parts[2]).isascii()
    ):
        raise MalformedMessage("a queued item is not `deadline|request|MAC|payload`")
    deadline_ms = int(parts[0])
    if parts[0] != b"%d" % deadline_ms:
        raise MalformedMessage("a deadline is written in one way only")
    return Frame(raw, deadline_ms, parts[1].decode("ascii"), parts[2].decode("ascii"), parts[3])


class ChangeMessage(messages.RequestMessage, frozen=True, kw_only=True):
    """Holds what a request carries that changes a working order."""

    order_id: Id
    symbol: Word
    tag: Word
    broker_order_id: Id | None


class CancelOrder(ChangeMessage, frozen=True, kw_only=True, tag="cancel_order"):
    """Cancels a working order. Passes every switch."""


class QuantityMeaning(StrEnum):
    """Says what a broker does with the number of a quantity change."""

    REDUCE_BY = "reduce_by"  # takes it off the order
    NEW_TOTAL = "new_total"  # makes it the order's quantity


class ConfirmedQuantityChange(msgspec.Struct, frozen=True, kw_only=True):
    """Says what a person with keys saw the broker do (`berth broker check`), in this order's mode:
    simulation or production."""

    sdk_version: Word
    lot: OrderLot
    #: True for a contract, whose lot is `COMMON`, too.
    futures: bool
    meaning: QuantityMeaning


class ReplaceOrder(ChangeMessage, frozen=True, kw_only=True, tag="replace_order"):
    """Changes a working order to a smaller quantity or another price.
    At most once, like a submission."""

    #: New total quantity, at least the filled one; None: unchanged. It can only fall.
    quantity: Lots | None
    price: Decimal | None
    #: The order's own, for the switch:
    #: another price is checked like a new order, a smaller quantity never.
    reduce_only: bool = False
    #: As in `PlaceOrder`.
    price_band: Decimal | None = None
    #: The confirmed meanings for brokers whose quantity changes are not known to mean one thing.
    confirmed: Annotated[tuple[ConfirmedQuantityChange, ...], LIST_BOUNDS] = ()

    def __post_init__(self) -> None:
        check_prices(price=self.price, price_band=self.price_band)


class QueryAccount(messages.RequestMessage, frozen=True, kw_only=True, tag="query_account"):
    """Asks what the broker knows of one account now. The answer carries an `AccountReport`."""

    orders: bool = True
    #: Only the orders with these tags; empty: all. A report has room for some hundreds.
    tags: Annotated[tuple[Word, ...], LIST_BOUNDS] = ()
    positions: bool = False
    balance: bool = False


class ListInstruments(messages.RequestMessage, frozen=True, kw_only=True, tag="list_instruments"):
    """Asks for a page of the instruments that the broker of an account lists. The answer carries an
    `InstrumentPage`.

    The first page (`after` is '') makes the session read the list at the broker, unless it has just
    done so. While it reads, it answers `INSTRUMENTS_LOADING`, which says when to ask again: orders
    go first. A broker without a list answers `INSTRUMENTS_UNSUPPORTED`; one that lists nothing yet
    `INSTRUMENTS_UNAVAILABLE`. A reader keeps what it has until it has all pages of one list
    (`InstrumentPage.taken_at_ms`). A worker of release 0.1.0 answers `MALFORMED_MESSAGE`.
    """

    #: The record's name of the market; '': all that the account's broker lists.
    market: MarketOrAll = ""
    #: The last code of the page before; '': from the first one.
    after: CodeOrNone = ""
    #: Instruments in the page, at most. It may have fewer, because its bytes have a bound, too.
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_INSTRUMENTS_PER_PAGE)] = (
        MAX_INSTRUMENTS_PER_PAGE
    )


#: Requests that change nothing at the broker.
Query = QueryAccount | ListInstruments
Request = messages.PlaceOrder | CancelOrder | ReplaceOrder | QueryAccount | ListInstruments


class AccountReport(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's view of an account, as one session saw it."""

    account_id: Id
    taken_at_ms: TimeMs
    #: True if the report has everything that was asked for.
    complete: bool
    #: True if all orders that the broker took between `reaches_ms` and `behind_ms` before are
    #: certainly listed. False where a list may leave out any, such as those of earlier sessions
    #: (Shioaji's simulation, Sinotrade/Shioaji #218).
    absence_certain: bool
    behind_ms: SpanMs = 0
    #: None if the broker does not say.
    reaches_ms: SpanMs | None = None
    #: True if the positions include the fills of all orders that are certainly listed.
    positions_agree: bool = False
    orders: Annotated[list[BrokerOrder], LIST_BOUNDS] = []
    positions: Annotated[list[Position], LIST_BOUNDS] = []
    #: True if the positions have the shares beyond full lots. Workers of release 0.1.0 do not
    #: report them.
    odd_shown: bool = False
    balance: Balance | None = None


def decode_report(report: dict[str, Any]) -> AccountReport:
    """Reads `Answer.report` or `AccountReported.report`; raises `MalformedMessage`."""
    try:
        return msgspec.convert(report, AccountReport)
    except msgspec.ValidationError as error:
        raise MalformedMessage(str(error)) from None


def encode_report(report: AccountReport) -> dict[str, Any]:
    """Returns a report as it travels in a message."""
    fields: dict[str, Any] = msgspec.to_builtins(report)
    return fields


# --- the switch -----------------------------------------------------------------------------------

#: Fields of the hash: for all of a user's accounts, for the version, for the server to
#: which it was written, and the MAC over all others. The others are account ids, which
#: begin with a letter or digit.
EVERY_ACCOUNT = "*"
SWITCH_VERSION = "*version"
SWITCH_SERVER = "*server"
SWITCH_MAC = "*mac"


class SwitchState(StrEnum):
    """Which orders are accepted: all, only those that make
    a position smaller, or none. Cancels always are."""

    OPEN = "open"
    REDUCING = "reducing"
    HALTED = "halted"


_STRICTNESS = (SwitchState.OPEN, SwitchState.REDUCING, SwitchState.HALTED)


def strictest(*states: SwitchState) -> SwitchState:
    """Returns the strictest of the states; open if none is given."""
    return max(states, key=_STRICTNESS.index, default=SwitchState.OPEN)


class UserSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that switches one user."""

    #: Version of the newest change in it; 0 if nobody ever switched.
    version: int = 0
    #: The state for all accounts.
    every: SwitchState = SwitchState.OPEN
    #: Accounts that have a state of their own which is not open.
    accounts: Mapping[str, SwitchState] = {}
    #: Run id of the Valkey server to which it was written; '' if none. Another server, promoted or
    #: restarted, may hold an older copy, so it is written anew.
    server: str = ""

    def of(self, account_id: str) -> SwitchState:
        """Returns the state of one account."""
        return strictest(self.every, self.accounts.get(account_id, SwitchState.OPEN))

    def words(self, request_keys: MessageKeys, user_id: str) -> list[str | int]:
        """Returns the version, then signed fields and values, for `write_switch.lua` and
        `set_owner.lua`."""
        mac = sign(request_keys, *self._signed(user_id))
        words: list[str | int] = [self.version, EVERY_ACCOUNT, self.every.value, SWITCH_MAC, mac]
        if self.server:
            words += [SWITCH_SERVER, self.server]
        for account_id, state in sorted(self.accounts.items()):
            words += [account_id, state.value]
        return words

    def is_authentic(self, mac: str, request_keys: MessageKeys, user_id: str) -> bool:
        """Returns True if a holder of the user's request key wrote exactly this."""
        return verify(request_keys, mac, *self._signed(user_id))

    def _signed(self, user_id: str) -> list[bytes]:
        states = [part for pair in sorted(self.accounts.items()) for part in pair]
        texts = [user_id, str(self.version), self.server, self.every.value, *states]
        return [b"switch/1", *(text.encode() for text in texts)]


#: The switch of a user whom nobody ever switched.
OPEN_SWITCH = UserSwitch()
#: The meaning of a missing switch.
HALTED_SWITCH = UserSwitch(every=SwitchState.HALTED)


def switch_of(
    words: Sequence[bytes], server: str, request_keys: MessageKeys, user_id: str
) -> tuple[UserSwitch, bool]:
    """Returns the switch that HGETALL read at the server with this run id, and whether it is stale.

    A switch that is missing, forged or malformed is `HALTED_SWITCH`. A stale switch was written to
    another server: it may be an older copy of the last one, so it is halted, too, until it is
    written to this server.
    """
    texts = [word.decode("utf-8", "replace") for word in words]
    fields = dict(zip(texts[::2], texts[1::2], strict=True))
    version, every = fields.pop(SWITCH_VERSION, ""), fields.pop(EVERY_ACCOUNT, "")
    written_to, mac = fields.pop(SWITCH_SERVER, ""), fields.pop(SWITCH_MAC, "")
    try:
        switch = UserSwitch(
            version=int(version[:18]),
            every=SwitchState(every),
            accounts={name: SwitchState(value) for name, value in fields.items()},
            server=written_to,
        )
    except ValueError:
        return HALTED_SWITCH, False
    if not switch.is_authentic(mac, request_keys, user_id):
        return HALTED_SWITCH, False
    if written_to not in ("", server):
        return HALTED_SWITCH, True
    return switch, False


class BooksCompared(messages.ControlHeader, frozen=True, kw_only=True, tag="books_compared"):
    """Says that what the broker listed was compared with our books. It needs no number: once a
    session was told of a report, nothing counts that is said of it again, or of an earlier one."""

    account_id: Id
    #: `AccountReported.at_ms` of the report.
    at_ms: Counter
    #: The books differ: the account takes no orders until a person has looked.
    blocks: bool


ControlMessage = messages.Shutdown | messages.ReloadCredentials | BooksCompared
