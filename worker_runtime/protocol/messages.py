"""The messages that cross Valkey, as JSON, which an operator can read with `valkey-cli`.

Each names its type and schema version. Unknown fields are ignored, so that an older worker understands a
newer API; an unknown type or version raises `MalformedMessage`. Times are Unix milliseconds, prices are
decimal strings, quantities are lots.
"""

from __future__ import annotations

import math
from decimal import Decimal
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from worker_runtime.protocol.errors import BerthError, MalformedMessage, UnsupportedSchema, from_code

#: The schema version this release writes. It reads all versions up to it.
SCHEMA = 1
#: Bytes; a larger message is refused unread (an order takes about 400).
MAX_MESSAGE = 256 * 1024


class Side(StrEnum):
    BUY = "buy"
    SELL = "sell"


class PriceType(StrEnum):
    LIMIT = "LMT"
    MARKET = "MKT"


class TimeInForce(StrEnum):
    ROD = "ROD"  # rest of day
    IOC = "IOC"  # immediate or cancel
    FOK = "FOK"  # fill or kill


class OrderState(StrEnum):
    """States of an order; `FINAL_ORDER_STATES` never change again."""

    ACCEPTED = "accepted"
    QUEUED = "queued"
    SUBMITTING = "submitting"
    SUBMITTED = "submitted"
    PART_FILLED = "part_filled"
    FILLED = "filled"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    EXPIRED = "expired"
    UNKNOWN = "unknown"
    NEEDS_ATTENTION = "needs_attention"


FINAL_ORDER_STATES = frozenset(
    {OrderState.FILLED, OrderState.CANCELLED, OrderState.REJECTED, OrderState.EXPIRED}
)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """The base of all messages: `type` names the class, `v` the schema version."""

    v: int = SCHEMA


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error in a message: its stable code and a sentence."""

    code: str
    detail: str
    retryable: bool = False
    #: Milliseconds after which it may succeed, where that is known.
    retry_after_ms: int | None = None

    @classmethod
    def of(cls, error: BerthError) -> Failure:
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


# --- API → worker -----------------------------------------------------------------------------------


class RequestMessage(Message, frozen=True, kw_only=True):
    """What each request in a user's queue carries."""

    request_id: str
    user_id: str
    account_id: str
    #: Channel of the API process that waits.
    reply_to: str
    #: Generation of Valkey under which this was enqueued.
    generation: str


class PlaceOrder(RequestMessage, frozen=True, kw_only=True, tag="place_order"):
    """Submits one order, at most once."""

    order_id: str
    symbol: str
    side: Side
    quantity: int
    price_type: PriceType
    price: Decimal | None
    time_in_force: TimeInForce
    #: At most 6 characters: all that Shioaji's `custom_field` holds.
    tag: str
    #: Whether it can only make a position smaller, and so passes a switch that says REDUCING.
    reduce_only: bool = False
    #: What an order of unknown outcome blocks in its account: orders in its `symbol`, the whole `account`, or
    #: nothing (`off`).
    unknown_blocks: str = "symbol"
    #: Milliseconds from its acceptance to its deadline; 0 if unknown.
    lifetime_ms: int = 0
    #: The broker's id of the order, if known. In `open_orders` only.
    broker_order_id: str | None = None
    #: Whether its submission was begun by our books. In `open_orders` only. It is never submitted again then,
    #: even if an older copy of Valkey has it in the queue once more, without its journal entry.
    begun: bool = False


class Fill(msgspec.Struct, frozen=True, kw_only=True):
    """One deal. Duplicates are recognised by `fill_id`, the broker's id of it."""

    fill_id: str
    quantity: int
    price: Decimal
    at_ms: int


#: The reason of an order that was cancelled while it was in the queue: the broker never had it.
CANCELLED_IN_QUEUE = "cancelled before it was sent to the broker"


class OrderOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an order after the broker answered."""

    order_id: str
    state: OrderState
    broker_order_id: str | None = None
    filled_quantity: int = 0
    average_price: Decimal | None = None
    reason: str | None = None
    #: Withdrawn from the queue before a worker took it. A lagging copy of Valkey may still hold an order that
    #: a worker took, so this counts only for an order that nobody is known to have taken.
    withdrawn: bool = False


class Answer(Message, frozen=True, kw_only=True, tag="answer"):
    """The worker's answer to one request: an outcome, or a failure."""

    request_id: str
    outcome: OrderOutcome | None = None
    failure: Failure | None = None
    #: For `QueryAccount`: an `AccountReport`, which `requests.decode_report` reads.
    report: dict[str, Any] | None = None


# --- orchestrator → worker --------------------------------------------------------------------------


class SealedAccount(msgspec.Struct, frozen=True, kw_only=True):
    """One broker account; `sealed` opens to a JSON `Credentials` only inside the named worker."""

    account_id: str
    broker: str
    broker_type: str
    simulation: bool
    version: int
    sealed: bytes


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker login needs, in clear. It never leaves the processes that invariant *sealed* names."""

    api_key: str
    secret_key: str
    person_id: str = ""
    ca_certificate: bytes = b""
    ca_password: str = ""

    def __repr__(self) -> str:
        return "Credentials(…)"


class Claim(Message, frozen=True, kw_only=True, tag="claim"):
    """Makes a pool worker the worker of one user."""

    claim_id: str
    worker_id: str
    user_id: str
    epoch: int
    generation: str
    #: Seconds the worker may take for its first connect.
    connect_timeout: float
    accounts: list[SealedAccount]
    attempt: int = 1
    #: The user's orders that are not final: what the worker compares with the broker's list.
    open_orders: list[PlaceOrder] = []


class Connect(Message, frozen=True, kw_only=True, tag="connect"):
    """Asks for another attempt to connect, after one that failed."""

    claim_id: str
    worker_id: str
    attempt: int
    connect_timeout: float


class ReleaseClaim(Message, frozen=True, kw_only=True, tag="release"):
    """Ends a claimed worker that is not wanted any more."""

    claim_id: str
    worker_id: str
    reason: str


InboxMessage = Claim | Connect | ReleaseClaim


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """Makes the worker finish its order, close the broker sessions, remove the mark and exit with 0."""

    user_id: str
    epoch: int
    reason: str


class ReloadCredentials(Message, frozen=True, kw_only=True, tag="reload_credentials"):
    """Brings new credentials, sealed to this worker. Only accounts whose version changed log in again.

    The worker answers with a `ClaimReply` on `pool_reply(pool, reload_id)`.
    """

    reload_id: str
    user_id: str
    epoch: int
    worker_id: str
    accounts: list[SealedAccount]
    #: As in `Claim`.
    open_orders: list[PlaceOrder] = []


ControlMessage = Shutdown | ReloadCredentials


class Signed(Message, frozen=True, kw_only=True, tag="signed"):
    """A message with the orchestrator's Ed25519 signature over exactly these payload bytes."""

    payload: bytes
    signature: bytes


class ClaimReply(Message, frozen=True, kw_only=True, tag="claim_reply"):
    """The worker's answer to a claim, a further connect or a credential reload."""

    claim_id: str
    worker_id: str
    epoch: int
    attempt: int
    failure: Failure | None = None
    claimed_at_ms: int = 0
    connected_at_ms: int = 0


# --- worker → orchestrator (stream `worker:events`) --------------------------------------------------


class WorkerEventKind(StrEnum):
    """Changes in a worker's life, sent once for the whole worker and not for each account."""

    CONNECTED = "connected"  # every account has a broker session
    RECONNECTING = "reconnecting"  # a broker session was dead and is being rebuilt
    DEGRADED = "degraded"  # the broker cannot be reached: the worker stays and tries again
    SESSION_REPLACED = "session_replaced"  # a fresh session process with a new key waits for credentials
    FAILED = "failed"  # not even a fresh process could open a broker session: the worker ends
    CLOSED = "closed"  # the session has ended
    OWNER_MISSING = "owner_missing"
    FENCED = "fenced"


class WorkerEvent(Message, frozen=True, kw_only=True, tag="worker_event"):
    """A change in a worker's life. `(worker_id, sequence)` is unique."""

    worker_id: str
    user_id: str
    epoch: int
    sequence: int
    kind: WorkerEventKind
    at_ms: int
    detail: str = ""


class OrderEvent(Message, frozen=True, kw_only=True, tag="order_event"):
    """A change of one order, as the worker saw it. Repeats are recognised by the unique `event_id`."""

    event_id: str
    order_id: str
    user_id: str
    epoch: int
    state: OrderState
    at_ms: int
    broker_order_id: str | None = None
    fill: Fill | None = None
    filled_quantity: int = 0
    average_price: Decimal | None = None
    reason: str | None = None
    #: The order's quantity (lots) and price, where the broker shows others than our books.
    quantity: int | None = None
    price: Decimal | None = None


class AccountReported(Message, frozen=True, kw_only=True, tag="account_reported"):
    """What a session found at the broker after a login, for a comparison with our books.

    It follows the events of the orders that the session knows. `(worker_id, account_id, at_ms)` is unique.
    """

    worker_id: str
    user_id: str
    account_id: str
    epoch: int
    at_ms: int
    #: An `AccountReport` (`requests.decode_report` reads it), with only the orders that the session could not
    #: match.
    report: dict[str, Any]


Event = WorkerEvent | OrderEvent | AccountReported

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | str, wanted: type[T] | Any, *, limit: int = MAX_MESSAGE) -> T:
    """Decodes one message of the `wanted` type (a class or a union of classes), of at most `limit` bytes.
    Raises `MalformedMessage` for anything else, `UnsupportedSchema` for a later schema version."""
    if len(data) > limit:
        raise MalformedMessage(f"{len(data)} bytes are more than {limit}")
    decoder = _decoders.get(wanted)
    if decoder is None:
        decoder = _decoders[wanted] = msgspec.json.Decoder(wanted)
    try:
        message = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec names the field and the reason, never the value: nothing secret reaches the log.
        raise MalformedMessage(str(error)) from None
    version = getattr(message, "v", SCHEMA)
    if not 1 <= version <= SCHEMA:
        raise UnsupportedSchema(f"schema version {version}; this release reads 1 to {SCHEMA}")
    return message  # type: ignore[no-any-return]
