"""The catalog of jobs: the arguments and the result of each type, and how it is enqueued.

All arguments are bounded, so that a producer refuses what no runner would accept. A worker has no
database, so the orders of a statement or an export travel in the job, packed. Quantities are lots.
Times of orders are ISO 8601, other times Unix milliseconds.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from hashlib import sha256
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.protocol.bounds import plain_number
from worker_runtime.protocol.broker_reports import Balance, Position
from worker_runtime.protocol.errors import BerthError, MalformedMessage

#: Bytes of packed orders: as base64 they fit into a job,
#: and their CSV into a result. About 700 orders.
MAX_PACKED_BYTES = 40 * 1024
#: Bytes of orders once they are unpacked.
_MAX_UNPACKED_BYTES = 4 * 1024 * 1024

_Id = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
_Packed = Annotated[bytes, msgspec.Meta(max_length=MAX_PACKED_BYTES)]
#: `YYYY-MM-DD`, a day of the home markets.
_Day = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\d\Z")]
_Url = Annotated[str, msgspec.Meta(min_length=1, max_length=2048, pattern=r"^[!-~]+\Z")]
_Address = Annotated[
    str, msgspec.Meta(max_length=254, pattern=r"^[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+@[A-Za-z0-9.-]+\Z")
]
#: E.164.
_Phone = Annotated[str, msgspec.Meta(pattern=r"^\+[1-9]\d{6,14}\Z")]
#: What Twilio takes as one message.
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1600)]
_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Values = Annotated[
    dict[_Word, Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=20)
]


class TooManyOrders(BerthError, code="TOO_MANY_ORDERS", status=422):
    """There are more orders than one job can carry. Choose a shorter time, or use the export of the
    API."""


class OrderRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Describes one order, with the columns of an export in their order."""

    accepted_at: str
    id: str
    client_order_id: str
    account_id: str
    symbol: str
    side: str
    quantity: int
    price_type: str
    price: Decimal | None
    time_in_force: str
    state: str
    filled_quantity: int
    average_price: Decimal | None
    broker_order_id: str | None = None
    reduce_only: bool = False
    origin: str | None = None
    code: str | None = None
    reason: str | None = None
    lot: str = "common"
    condition: str = "cash"
    open_close: str = "auto"


def pack_orders(rows: Sequence[OrderRow]) -> bytes:
    """Packs orders as they travel in a job; raises `TooManyOrders`."""
    packed = zlib.compress(msgspec.json.encode(rows), 9)
    if len(packed) > MAX_PACKED_BYTES:
        raise TooManyOrders(f"{len(rows)} orders are more than one job can carry")
    return packed


def unpack_orders(packed: bytes) -> list[OrderRow]:
    """Returns the orders of a job; raises `MalformedMessage`."""
    try:
        return msgspec.json.decode(decompress(packed), type=list[OrderRow])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"the orders cannot be read: {error}") from None


#: The beginnings of a spreadsheet's formula, with their wide forms (OWASP, "CSV injection").
_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001 - meant


def csv_of(rows: Iterable[OrderRow], *, header: bool) -> bytes:
    """Returns orders as CSV (RFC 4180), with the names of the columns before them if `header`."""
    import csv  # only exports need it, and few of those who import this module export anything

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    columns = OrderRow.__struct_fields__
    if header:
        writer.writerow(columns)
    for row in rows:
        writer.writerow([cell_text(getattr(row, column)) for column in columns])
    return out.getvalue().encode()


def cell_text(value: object) -> str:
    """Returns a value as a cell of a CSV file;
    none of them is a formula that a spreadsheet would run."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = plain_number(value) if isinstance(value, Decimal) else str(value)
    # An apostrophe makes it text: a spreadsheet would run it.
    return f"'{text}" if text.startswith(_FORMULA_PREFIXES) else text


def decompress(packed: bytes) -> bytes:
    """Decompresses the orders of a job, or the CSV of an export; raises `MalformedMessage`."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(packed, _MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise MalformedMessage(f"the packed data cannot be read: {error}") from None
    if not inflater.eof:
        raise MalformedMessage("the packed data is cut off, or longer than a job may carry")
    return data


# --- arguments ------------------------------------------------------------------------------------


class PingRunner(msgspec.Struct, frozen=True, kw_only=True):
    """Checks that a runner takes and runs jobs: `text` comes back."""

    text: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class DeliverWebhook(msgspec.Struct, frozen=True, kw_only=True):
    """POST `body` to `url`, signed with the recipient's key (`webhook_signing.py`)."""

    url: _Url
    #: Its key signs the delivery: a user's id, or a name chosen by operators.
    recipient: _Id
    #: Such as `order.filled`.
    event: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}\Z")]
    #: JSON, sent exactly as it is here.
    body: msgspec.Raw


class SendEmail(msgspec.Struct, frozen=True, kw_only=True):
    """Sends one mail to one address, so that the server's answer is about that address."""

    to: _Address
    subject: Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]{1,200}\Z")]
    text: Annotated[str, msgspec.Meta(max_length=16_000)]


class SendSms(msgspec.Struct, frozen=True, kw_only=True):
    """Sends one SMS to one number."""

    to: _Phone
    text: _Text


class SendWhatsapp(msgspec.Struct, frozen=True, kw_only=True):
    """Sends one WhatsApp message: free text within 24 h of the recipient's last message, otherwise
    a template."""

    to: _Phone
    text: _Text | None = None
    #: Id of an approved template (`HX…`), and its variables.
    template: Annotated[str, msgspec.Meta(pattern=r"^HX[0-9a-fA-F]{32}\Z")] | None = None
    variables: _Values = {}

    def __post_init__(self) -> None:
        if (self.text is None) == (self.template is None):
            raise ValueError("either text or template")


class SendPush(msgspec.Struct, frozen=True, kw_only=True):
    """Sends one notification to one installed app, by its registration token."""

    token: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,4096}\Z")]
    title: Annotated[str, msgspec.Meta(max_length=200)]
    text: Annotated[str, msgspec.Meta(max_length=2000)]
    #: For the app, which the device's user does not see.
    data: _Values = {}


class MakeStatement(msgspec.Struct, frozen=True, kw_only=True):
    """The statement of one user's day, from the orders accepted in it."""

    user_id: _Id
    day: _Day
    orders: _Packed


class MailStatement(MakeStatement, frozen=True, kw_only=True):
    """The statement of one user's day as a mail."""

    to: _Address


class PostStatement(MakeStatement, frozen=True, kw_only=True):
    """The statement of one user's day as a webhook, signed with the user's key."""

    url: _Url


class ExportOrders(msgspec.Struct, frozen=True, kw_only=True):
    """Orders of one user as CSV, in the given order."""

    user_id: _Id
    orders: _Packed


class SnapshotPositions(msgspec.Struct, frozen=True, kw_only=True):
    """Positions and balance of an account, from the user's session."""

    user_id: _Id
    account_id: _Id
    #: Seconds that the session has to answer.
    patience: Annotated[float, msgspec.Meta(gt=0, le=120)] = 30.0


# --- results --------------------------------------------------------------------------------------


class RunnerPong(msgspec.Struct, frozen=True, kw_only=True):
    """The text of the ping, and the process that answered."""

    text: str
    pid: int
    attempt: int


class WebhookReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The receiver's status, and how long the delivery took."""

    status: int
    elapsed_ms: float


class EmailReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The server has accepted the mail under this id."""

    message_id: str


class MessageReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The provider has accepted the message under this id."""

    message_id: str
    elapsed_ms: float


class StatementLine(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one symbol of one account: lots or shares bought and sold, their average prices."""

    account_id: str
    symbol: str
    bought: int = 0
    bought_average: Decimal | None = None
    sold: int = 0
    sold_average: Decimal | None = None
    #: The number of orders by state.
    orders: dict[str, int] = {}
    #: Whether these are odd lots: shares.
    odd: bool = False


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """A day's orders by account and symbol, without the broker's fees and taxes."""

    user_id: str
    day: str
    orders: int
    #: Orders that were not final when the statement was made: their fills may grow.
    open_orders: int
    lines: list[StatementLine]


class OrderExport(msgspec.Struct, frozen=True, kw_only=True):
    """CSV (RFC 4180, UTF-8), compressed with zlib."""

    user_id: str
    orders: int
    csv: bytes


class PositionSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Positions and balance, as the broker reported them at `taken_at_ms`."""

    user_id: str
    account_id: str
    taken_at_ms: int
    positions: list[Position]
    balance: Balance | None


# --- types ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobKind:
    """Says how jobs of one type are enqueued."""

    name: str
    queue: str
    #: Whether it may run again after its runner or process has died in the middle.
    idempotent: bool
    #: Seconds.
    timeout: float
    retry_delay: float = 120.0


JOB_KINDS: dict[type[msgspec.Struct], JobKind] = {
    PingRunner: JobKind("ping", "default", True, 10.0),
    #: Receivers recognise repeats by the delivery id. A minute is enough for a slow receiver.
    DeliverWebhook: JobKind("webhook", "webhook", True, 60.0),
    #: If the process dies, nobody can tell whether the mail was sent,
    #: and two mails are worse than none.
    SendEmail: JobKind("email", "email", False, 120.0),
    #: The same for these two: their provider knows no key by which it would recognise a repeat.
    SendSms: JobKind("sms", "sms", False, 60.0),
    SendWhatsapp: JobKind("whatsapp", "whatsapp", False, 60.0),
    #: A repeat replaces the first one on the device. The delay is FCM's least pause after too many.
    SendPush: JobKind("push", "push", True, 60.0, retry_delay=60.0),
    MakeStatement: JobKind("statement", "default", True, 60.0),
    #: On the queues of mails and webhooks: their runners have what these need.
    MailStatement: JobKind("statement_email", "email", False, 120.0),
    PostStatement: JobKind("statement_webhook", "webhook", True, 60.0),
    ExportOrders: JobKind("order_export", "default", True, 60.0),
    #: A session that logs in again is back within seconds.
    SnapshotPositions: JobKind("position_snapshot", "default", True, 150.0, retry_delay=10.0),
}


#: Queues whose jobs all wait for the same server: that of their provider.
PROVIDER_QUEUES = frozenset({"email", "sms", "whatsapp", "push"})
#: Queues whose jobs wait for servers of others nearly all the time.
WAITING_QUEUES = PROVIDER_QUEUES | {"webhook"}


def receiver_of(work: msgspec.Struct) -> str:
    """Returns the server that a job with these arguments waits for; empty if it waits for none."""
    queue = JOB_KINDS[type(work)].queue
    if not isinstance(work, DeliverWebhook | PostStatement):
        return queue if queue in PROVIDER_QUEUES else ""
    try:
        parts = urlsplit(work.url)
        host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        return ""
    # A name may have any length, and characters that no key has.
    text = f"{host}:{port}"
    return (
        text
        if len(text) <= 128 and not set(text) & set("{} ")
        else sha256(text.encode()).hexdigest()
    )


def make_job(job_id: str, work: msgspec.Struct, **options: Any) -> Job:
    """Returns the job with the arguments `work`; `options` are further fields of `Job`. Raises
    `MalformedMessage`."""
    kind = JOB_KINDS[type(work)]
    args = msgspec.json.encode(work)
    try:
        msgspec.json.decode(args, type=type(work))  # only decoding checks the bounds
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"arguments of {kind.name}: {error}") from None
    fields = {"receiver": receiver_of(work), **asdict(kind), **options}
    return Job(job_id=job_id, args=msgspec.Raw(args), **fields)
