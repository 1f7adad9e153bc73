"""The messages that cross Valkey, as JSON, which an operator can read with `valkey-cli`.

Each names its type and schema version. Unknown fields are ignored, so that an older worker
understands a newer API; an unknown type or version raises `MalformedMessage`. Times are Unix
milliseconds, prices are decimal strings, quantities are lots (of odd-lot orders: shares).
"""

import math
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Self, TypeVar

import msgspec

from worker_runtime.protocol import bounds
from worker_runtime.protocol.errors import (
    BerthError,
    MalformedMessage,
    UnsupportedSchema,
    from_code,
)
from worker_runtime.protocol.instruments import InstrumentPage
from worker_runtime.protocol.order_terms import CANCELLED_IN_QUEUE as CANCELLED_IN_QUEUE
from worker_runtime.protocol.order_terms import FINAL_ORDER_STATES as FINAL_ORDER_STATES
from worker_runtime.protocol.order_terms import OpenClose, OrderCondition, OrderLot
from worker_runtime.protocol.order_terms import OrderState as OrderState
from worker_runtime.protocol.order_terms import PriceType as PriceType
from worker_runtime.protocol.order_terms import Side as Side
from worker_runtime.protocol.order_terms import TimeInForce as TimeInForce

#: The latest schema version; all up to it are read. Messages are written as version 1,
#: but for those that a reader of version 1 would misunderstand, since it passes over
#: fields that it does not know.
SCHEMA_VERSION = 2
#: Bytes; a larger message is refused unread (an order takes about 400).
MAX_MESSAGE_BYTES = 256 * 1024


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """The base of all messages: `type` names the class, `v` the schema version."""

    v: int = 1


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error in a message: its stable code and a sentence."""

    code: bounds.Word
    detail: bounds.Sentence
    retryable: bool = False
    #: Milliseconds after which it may succeed, where that is known.
    retry_after_ms: bounds.SpanMs | None = None

    @classmethod
    def of(cls, error: BerthError) -> Self:
        after = error.retry_after
        return cls(
            code=error.code,
            detail=error.detail,
            retryable=error.retryable,
            retry_after_ms=None if after is None else math.ceil(after * 1000),
        )

    def error(self) -> BerthError:
        after = self.retry_after_ms
        return from_code(self.code, self.detail, None if after is None else after / 1000)


# --- API → worker ---------------------------------------------------------------------------------


class RequestMessage(Message, frozen=True, kw_only=True):
    """What each request in a user's queue carries."""

    request_id: bounds.LongId
    user_id: bounds.Id
    account_id: bounds.Id
    #: Channel of the API process that waits.
    reply_to: bounds.Channel
    #: Generation of Valkey under which this was enqueued.
    generation: bounds.Id
    #: The context of its trace (W3C's `traceparent`); '' if it is not traced.
    trace: bounds.Word = ""


class PlaceOrder(RequestMessage, frozen=True, kw_only=True, tag="place_order"):
    """Submits one order, at most once."""

    order_id: bounds.Id
    symbol: bounds.Word
    side: Side
    quantity: bounds.Lots
    price_type: PriceType
    price: Decimal | None
    time_in_force: TimeInForce
    #: With another lot, condition or type than these the message has version 2: a worker of release
    #: 0.1.0 refuses it, instead of placing lots where shares were meant.
    lot: OrderLot = OrderLot.COMMON
    condition: OrderCondition = OrderCondition.CASH
    open_close: OpenClose = OpenClose.AUTO
    #: At most 6 characters: all that Shioaji's `custom_field` holds.
    tag: bounds.Word
    #: Whether it can only make a position smaller, and so passes a switch that says REDUCING.
    reduce_only: bool = False
    #: What an order of unknown outcome blocks in its account: orders in its `symbol`, the whole
    #: `account`, or nothing (`off`).
    unknown_blocks: bounds.Word = "symbol"
    #: Milliseconds from its acceptance to its deadline; 0 if unknown.
    lifetime_ms: bounds.SpanMs = 0
    #: The broker's id of the order, if known. In `open_orders` only.
    broker_order_id: bounds.Id | None = None
    #: Our books say that its submission had begun. Then it is never submitted again, even if an
    #: older copy of Valkey has it in the queue once more, without its journal entry. In
    #: `open_orders` only.
    begun: bool = False
    #: The share by which the price may differ from the broker's reference price; None: any.
    price_band: Decimal | None = None
    #: Of a market order: up to this reference price its value is within the account's limit.
    most_price: Decimal | None = None

    def __post_init__(self) -> None:
        bounds.check_prices(
            price=self.price, price_band=self.price_band, most_price=self.most_price
        )


class Fill(msgspec.Struct, frozen=True, kw_only=True):
    """One deal. Duplicates are recognised by `fill_id`, the broker's id of it."""

    fill_id: bounds.LongId
    quantity: bounds.Lots
    price: Decimal
    at_ms: bounds.TimeMs

    def __post_init__(self) -> None:
        bounds.check_prices(price=self.price)


class OrderOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an order after the broker answered."""

    order_id: bounds.Id
    state: OrderState
    broker_order_id: bounds.Id | None = None
    filled_quantity: bounds.Lots = 0
    average_price: Decimal | None = None
    reason: bounds.Sentence | None = None
    #: Withdrawn from the queue before a worker took it. A lagging copy of Valkey may
    #: still hold an order that a worker took, so this counts only for an order that
    #: nobody is known to have taken.
    withdrawn: bool = False

    def __post_init__(self) -> None:
        bounds.check_prices(average_price=self.average_price)


class Answer(Message, frozen=True, kw_only=True, tag="answer"):
    """The worker's answer to one request: an outcome, or a failure."""

    request_id: bounds.LongId
    outcome: OrderOutcome | None = None
    failure: Failure | None = None
    #: For `QueryAccount`: an `AccountReport`, which `requests.decode_report` reads.
    report: dict[str, Any] | None = None
    #: For `ListInstruments`.
    instruments: InstrumentPage | None = None
    #: For metrics: microseconds that the broker took,
    #: and permille of its fullest limit that are in use.
    broker_us: bounds.SpanUs | None = None
    limit_used: bounds.Permille | None = None


# --- orchestrator → worker ------------------------------------------------------------------------


class SealedAccount(msgspec.Struct, frozen=True, kw_only=True):
    """One broker account; `sealed` opens to a JSON `Credentials` only inside the named worker."""

    account_id: bounds.Id
    broker: bounds.Word
    broker_type: bounds.Word
    simulation: bool
    #: The broker's own id of the account; '': the same.
    number: bounds.Id = ""
    version: bounds.Counter
    #: Names of the budgets under which the user's calls as this person are counted, the
    #: oldest first. Two users share one only if an operator has linked them. A worker
    #: cannot guess another user's.
    budgets: Annotated[list[bounds.Id], msgspec.Meta(min_length=1, max_length=8)]
    #: Names of the user's share of the budget of the address from which the broker sees the
    #: worker's calls, the oldest first; none: calls are counted by person only.
    address_budgets: Annotated[list[bounds.Id], msgspec.Meta(max_length=8)] = []
    #: The size of that share, in permille of what one person may do.
    address_share: bounds.Counter = 1000
    #: The same by kind of call (`connections`, `logins`, `orders`, `queries`), where it is another
    #: one: the broker's record has limits of an address.
    address_shares: Annotated[dict[str, bounds.Counter], msgspec.Meta(max_length=8)] = {}
    sealed: bytes
    #: Whether orders wait after each login until `BooksCompared` came.
    books_first: bool = False


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker login needs, in clear.
    It never leaves the processes that invariant *sealed* names."""

    api_key: str
    secret_key: str
    person_id: str = ""
    ca_certificate: bytes = b""
    ca_password: str = ""

    def __repr__(self) -> str:
        return "Credentials(…)"


class Claim(Message, frozen=True, kw_only=True, tag="claim"):
    """Makes a pool worker the worker of one user."""

    claim_id: bounds.LongId
    worker_id: bounds.LongId
    user_id: bounds.Id
    epoch: bounds.Counter
    generation: bounds.Id
    #: Version of the user's switch at the claim; the worker refuses an older one.
    switch_version: bounds.Counter = 0
    #: Seconds the worker may take for its first connect.
    connect_timeout: bounds.WaitSeconds
    accounts: Annotated[list[SealedAccount], bounds.ACCOUNT_BOUNDS]
    #: The worker's `authentication.AssignmentKeys`, sealed like an account.
    sealed_keys: bytes
    attempt: bounds.Counter = 1
    #: The user's orders that are not final: what the worker compares with the broker's list.
    open_orders: Annotated[list[PlaceOrder], bounds.LIST_BOUNDS] = []


class Connect(Message, frozen=True, kw_only=True, tag="connect"):
    """Asks for another attempt to connect, after one that failed."""

    claim_id: bounds.LongId
    worker_id: bounds.LongId
    attempt: bounds.Counter
    connect_timeout: bounds.WaitSeconds


class ReleaseClaim(Message, frozen=True, kw_only=True, tag="release"):
    """Ends a claimed worker that is not wanted any more."""

    claim_id: bounds.LongId
    worker_id: bounds.LongId
    reason: bounds.Sentence


InboxMessage = Claim | Connect | ReleaseClaim


class ControlHeader(Message, frozen=True, kw_only=True):
    """What each control message carries."""

    user_id: bounds.Id
    epoch: bounds.Counter


class Shutdown(ControlHeader, frozen=True, kw_only=True, tag="shutdown"):
    """Makes the worker finish its order, close the broker sessions, remove the mark and exit with
    0.

    It needs no number: once it was said, this assignment ends,
    whatever else is said before or after.
    """

    reason: bounds.Sentence


class ReloadCredentials(ControlHeader, frozen=True, kw_only=True, tag="reload_credentials"):
    """Brings new credentials, sealed to this worker.
    Only accounts whose version changed log in again.

    The worker answers with a `ClaimReply` on `pool_reply(pool, worker_id, reload_id)`.
    """

    reload_id: bounds.LongId
    worker_id: bounds.LongId
    #: Grows with each reload (`next_number`): a worker refuses one that is not above the last.
    number: bounds.Counter = 0
    accounts: Annotated[list[SealedAccount], bounds.ACCOUNT_BOUNDS]
    #: As in `Claim`.
    sealed_keys: bytes
    #: As in `Claim`.
    open_orders: Annotated[list[PlaceOrder], bounds.LIST_BOUNDS] = []


class Signed(Message, frozen=True, kw_only=True, tag="signed"):
    """A message with signatures over exactly these payload bytes; one that fits is enough.

    The orchestrator's are Ed25519, one by each signing key that it holds, since workers launched
    before a rotation know only the older one. That of a claim's reply is HMAC-SHA256 under the
    worker's launch token.
    """

    payload: bytes
    signatures: Annotated[list[bytes], msgspec.Meta(max_length=4)]


class AccountLogin(msgspec.Struct, frozen=True, kw_only=True):
    """How the login of one account stands."""

    account_id: bounds.Id
    #: What is wrong; '' if there is a session.
    code: bounds.Word = ""
    #: The newest version of its credentials,
    #: if the broker has rejected that. An older one may be connected.
    rejected: bounds.Counter = 0
    #: What is wrong with the login, or with the rejected one, in words.
    detail: bounds.Sentence = ""
    #: The version of the credentials of its session,
    #: and when their certificate expires; 0: not known.
    version: bounds.Counter = 0
    certificate_ends_ms: bounds.TimeMsOrZero = 0


class ClaimReply(Message, frozen=True, kw_only=True, tag="claim_reply"):
    """The worker's answer to a claim, a further connect or a credential reload."""

    claim_id: bounds.LongId
    worker_id: bounds.LongId
    epoch: bounds.Counter
    attempt: bounds.Counter
    failure: Failure | None = None
    claimed_at_ms: bounds.TimeMsOrZero = 0
    connected_at_ms: bounds.TimeMsOrZero = 0
    #: Of each account that has been tried, at `at_ms`.
    logins: Annotated[list[AccountLogin], bounds.ACCOUNT_BOUNDS] = []
    at_ms: bounds.TimeMsOrZero = 0


# --- worker → orchestrator (stream `worker:events`) -----------------------------------------------


class WorkerEventKind(StrEnum):
    """Changes in a worker's life, sent once for the whole worker and not for each account."""

    CONNECTED = "connected"  # an account has a broker session; `logins` says which others have none
    RECONNECTING = "reconnecting"  # no account has a session: a dead one is being rebuilt
    DEGRADED = "degraded"  # the broker cannot be reached: the worker stays and tries again
    SESSION_REPLACED = (
        "session_replaced"  # a fresh session process with a new key waits for credentials
    )
    FAILED = "failed"  # not even a fresh process could open a broker session: the worker ends
    CLOSED = "closed"  # the session has ended
    OWNER_MISSING = "owner_missing"
    FENCED = "fenced"


class WorkerEvent(Message, frozen=True, kw_only=True, tag="worker_event"):
    """A change in a worker's life. `(worker_id, sequence)` is unique."""

    worker_id: bounds.LongId
    user_id: bounds.Id
    epoch: bounds.Counter
    sequence: bounds.Counter
    kind: WorkerEventKind
    at_ms: bounds.TimeMs
    detail: bounds.Sentence = ""
    #: Of each account that has been tried, if that has changed.
    logins: Annotated[list[AccountLogin], bounds.ACCOUNT_BOUNDS] = []


class OrderEvent(Message, frozen=True, kw_only=True, tag="order_event"):
    """A change of one order, as the worker saw it.
    Repeats are recognised by the unique `event_id`."""

    event_id: bounds.EventId
    order_id: bounds.OrderId
    user_id: bounds.Id
    epoch: bounds.Counter
    state: OrderState
    at_ms: bounds.TimeMs
    broker_order_id: bounds.Id | None = None
    fill: Fill | None = None
    filled_quantity: bounds.Lots = 0
    average_price: Decimal | None = None
    reason: bounds.Sentence | None = None
    #: The order's quantity (lots) and price, where the broker shows others than our books.
    quantity: bounds.Lots | None = None
    price: Decimal | None = None

    def __post_init__(self) -> None:
        bounds.check_prices(average_price=self.average_price, price=self.price)


class AccountReported(Message, frozen=True, kw_only=True, tag="account_reported"):
    """What a session found at the broker after a login, for a comparison with our books.

    It follows the events of the orders that the session knows.
    `(worker_id, account_id, at_ms)` is unique.
    """

    worker_id: bounds.LongId
    user_id: bounds.Id
    account_id: bounds.Id
    epoch: bounds.Counter
    at_ms: bounds.TimeMs
    #: An `AccountReport` (`requests.decode_report` reads it), with only the orders that the session
    #: could not match.
    report: dict[str, Any]


Event = WorkerEvent | OrderEvent | AccountReported

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | str, message_type: type[T] | Any, *, limit: int = MAX_MESSAGE_BYTES) -> T:
    """Decodes a message of at most `limit` bytes. `message_type`: a class or a union of classes.
    Raises `MalformedMessage` for anything else, `UnsupportedSchema` for a later schema version."""
    if len(data) > limit:
        raise MalformedMessage(f"{len(data)} bytes are more than {limit}")
    decoder = _decoders.get(message_type)
    if decoder is None:
        decoder = _decoders[message_type] = msgspec.json.Decoder(message_type)
    try:
        message = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec names the field and the reason, never the value: nothing secret reaches the log.
        raise MalformedMessage(str(error)) from None
    version = getattr(message, "v", SCHEMA_VERSION)
    if not 1 <= version <= SCHEMA_VERSION:
        raise UnsupportedSchema(
            f"schema version {version}; this release reads 1 to {SCHEMA_VERSION}"
        )
    return message  # type: ignore[no-any-return]
