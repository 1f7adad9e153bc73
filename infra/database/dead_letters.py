"""Lists what failed for good: workflow runs, jobs, alerts, messages that nobody can handle, and
orders that need an operator.

The table of this list holds all but the orders, which are in their own table. A repeat only
counts. Each source has at most `MAX_OPEN_LETTERS_PER_SOURCE` open letters, each kind
`MAX_OPEN_LETTERS`; what comes beyond that is counted in one letter of its source. A closed letter
opens again when the same thing fails again.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from uuid import UUID

import structlog
from redis.exceptions import RedisError
from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    Index,
    String,
    Uuid,
    bindparam,
    delete,
    func,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, aliased, mapped_column

from infra.database.engine import Database, outage_of
from infra.database.models import Base
from infra.database.orders.states import OPEN_STATES
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.worker_reports import payload_of

MAX_OPEN_LETTERS_PER_SOURCE = 100
MAX_OPEN_LETTERS = 10_000
#: Bytes kept of a message, and characters of a reason. A message that was cut cannot be handled
#: again.
MAX_MESSAGE_BYTES = 4_000
MAX_REASON_LENGTH = 500
#: Kinds of letters whose message is an entry of the stream of events.
MESSAGE_KINDS = frozenset({"event", "recorder", "relay"})
#: Classes of SQLSTATE for values that PostgreSQL never takes: a data exception, a violated
#: constraint, a value beyond a limit, one that our triggers refuse, one with more rows than it may
#: have.
_VALUE_FAULT_CLASSES = ("21", "22", "23", "44", "54", "P0")
#: Classes of faults that have nothing to do with the message, and that somebody mends: a
#: connection, a read-only server, a missing right or table, a lack of resources, a server that
#: stops or has a bad disk.
_SERVER_FAULT_CLASSES = ("08", "0A", "25", "28", "3D", "3F", "42", "53", "55", "57", "58", "F0")
#: How often a batch is tried on a fault of neither kind, such as a deadlock or an internal error.
#: Loops try once a second.
MAX_TRIES = 30

log = structlog.get_logger()


def fails_for_good(error: Exception) -> bool:
    """Returns True if handling the same message again meets the same error; False for an outage,
    which passes."""
    if isinstance(error, BerthError):
        return not error.retryable
    if isinstance(error, RedisError | OSError | TimeoutError) or outage_of(error) is not None:
        return False
    state = sqlstate_of(error)
    return state.startswith(_VALUE_FAULT_CLASSES) if state else True


class TryCounter:
    """Says when a loop gives up: at once, never, or after `MAX_TRIES` if the fault may be
    anybody's."""

    def __init__(self, max_tries: int = MAX_TRIES) -> None:
        self._most = max_tries
        self._tries = 0

    def gives_up(self, error: Exception) -> bool:
        """Returns True if the caller has to handle the batch one by one now, and to give up a
        message that alone meets the error."""
        if fails_for_good(error):
            return True
        state = sqlstate_of(error)
        if not state or state.startswith(_SERVER_FAULT_CLASSES):
            return False
        self._tries += 1
        return self._tries >= self._most

    def handled(self) -> None:
        """Records that the batch is done."""
        self._tries = 0


def sqlstate_of(error: Exception) -> str:
    """Returns PostgreSQL's code of an error, with and without a session; '' if it has none."""
    return str(getattr(getattr(error, "orig", error), "sqlstate", None) or "")


class DeadLetterRow(Base):
    __tablename__ = "dead_letters"
    __table_args__ = (
        Index("dead_letters_by_source", "source"),
        Index("dead_letters_by_time", "last_at"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))
    source: Mapped[str] = mapped_column(String(128))
    subject: Mapped[str] = mapped_column(String(256))
    user_id: Mapped[str] = mapped_column(String(64))
    reason: Mapped[str]
    message: Mapped[bytes]
    count: Mapped[int] = mapped_column(BigInteger, server_default="1")
    first_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    last_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: When it was redriven or dismissed; the audit trail says by whom, and why.
    closed_at: Mapped[datetime | None]

    @property
    def text(self) -> str:
        """The message for people, without its MAC."""
        payload = payload_of(self.message) if self.kind in MESSAGE_KINDS else self.message
        return payload.replace(b"\0", b"").decode("utf-8", "backslashreplace")


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """Something that failed for good."""

    #: `workflow`, `job`, `alert`; of messages the loop that gave up: `event`, `recorder`, `relay`,
    #: `late`, `outcome`. (`order` is made of the orders themselves.)
    kind: str
    #: Id of the workflow, order, or job (also of an alert); a repeat has the same. Empty: the
    #: message.
    subject: str = ""
    #: Who shares one part of the list, such as the user and epoch whose key signed a message.
    source: str = ""
    user_id: str = ""
    reason: str = ""
    message: bytes = b""
    #: When it failed; None: now. With a time, only a later one than the last is a repeat.
    at: datetime | None = None

    @property
    def id(self) -> UUID:
        head = f"{self.kind}\0{self.source}\0{self.subject}\0".encode("utf-8", "replace")
        return UUID(bytes=sha256(head + (b"" if self.subject else self.message)).digest()[:16])


class DeadLetterNotFound(BerthError, code="DEAD_LETTER_NOT_FOUND", status=404):
    """There is no such dead letter, or what failed has succeeded since."""


def reason_of(error: Exception) -> str:
    """Returns why a message failed, without the values that drivers quote in their errors."""
    if isinstance(error, BerthError):
        return f"{error.code}: {error.detail}"
    return f"{type(getattr(error, 'orig', None) or error).__name__} {sqlstate_of(error)}".strip()


_PUT = text(f"""
insert into dead_letters (id, kind, source, subject, user_id, reason, message, first_at, last_at)
select :id, :kind, :source, :subject, :user_id, :reason, cast(:message as bytea), now.at, now.at
  from (select coalesce(:at, clock_timestamp()) as at) as now
 where :overflow or exists (select from dead_letters where id = :id)
    or (select count(*) from dead_letters
        where source = :source and closed_at is null) < {MAX_OPEN_LETTERS_PER_SOURCE}
   and (select count(*) from dead_letters
         where kind = :kind and closed_at is null) < {MAX_OPEN_LETTERS}
    on conflict (id) do update
   set count = dead_letters.count + 1, last_at = coalesce(:at, clock_timestamp()),
       reason = excluded.reason, message = excluded.message, closed_at = null
 where :at is null or dead_letters.last_at < :at
returning (xmax = 0) as new
""").bindparams(  # noqa: S608 - constants of ours
    bindparam("id", type_=Uuid()),
    bindparam("at", type_=DateTime(timezone=True)),
    bindparam("overflow", type_=Boolean()),
    *(
        bindparam(name, type_=String())
        for name in ("kind", "source", "subject", "user_id", "reason")
    ),
)
_OPEN = ", ".join(f"'{state}'" for state in sorted(OPEN_STATES))
#: The whole list: the table, and the orders that wait for a person.
Letter = aliased(
    DeadLetterRow,
    text(f"""
select id, kind, source, subject, user_id, reason, message, count, first_at, last_at, closed_at
  from dead_letters
union all
select id, 'order', '', cast(id as varchar), user_id, attention, cast('' as bytea), 1,
       coalesce(attention_at, updated_at), coalesce(attention_at, updated_at), null
  from orders where attention is not null and state in ({_OPEN})
""")  # noqa: S608 - constants of ours
    .columns(*DeadLetterRow.__table__.columns)
    .subquery("letters"),
)


class DeadLetters:
    """Adds to the list in PostgreSQL."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, letters: Sequence[DeadLetter]) -> None:
        """Adds letters or counts repeats. Raises `DatabaseUnavailable`; then nothing was added."""
        if not letters:
            return
        async with self._database.session() as session:
            for letter in letters:
                await put_letter(session, letter)


async def put_letter(session: AsyncSession, letter: DeadLetter, *, overflow: bool = False) -> None:
    """Adds a letter or counts its repeat; `overflow`: whatever the list holds."""
    source = _clean(letter.source, 128)
    about = {
        "kind": letter.kind,
        "source": source,
        "subject": _clean(letter.subject, 256),
        "user_id": _clean(letter.user_id, 64),
        "reason": _clean(letter.reason, MAX_REASON_LENGTH),
    }
    kept = {
        "id": letter.id,
        "message": letter.message[:MAX_MESSAGE_BYTES],
        "at": letter.at,
        "overflow": overflow,
    }
    row = (await session.execute(_PUT, about | kept)).one_or_none()
    if row is not None:
        if row.new:  # no error of ours: operators are alerted of the list
            log.warning("dead_letter", **about)
    elif letter.at is None or await session.get(DeadLetterRow, letter.id) is None:
        # No room, no repeat.
        # All made-up sources share one letter once the list is full.
        known = await session.scalar(select(func.count()).where(DeadLetterRow.source == source))
        text = "more letters than are kept; this counts the rest"
        whose = source if known else ""
        rest = DeadLetter(kind="overflow", subject="more", source=whose, reason=text, at=letter.at)
        await put_letter(session, rest, overflow=True)


def _clean(text: str, length: int) -> str:
    """Returns text that PostgreSQL takes: no NUL and no half of a surrogate pair."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode()[:length]


async def list_letters(
    session: AsyncSession,
    *,
    kind: str | None = None,
    user_id: str | None = None,
    after: tuple[datetime, UUID] | None = None,
    limit: int,
) -> Sequence[DeadLetterRow]:
    """Lists a page of the open letters, the newest first. `after` is the end of the page before."""
    query = select(Letter).where(Letter.closed_at.is_(None))
    if kind is not None:
        query = query.where(Letter.kind == kind)
    if user_id is not None:
        query = query.where(Letter.user_id == user_id)
    if after is not None:
        query = query.where(tuple_(Letter.last_at, Letter.id) < after)
    query = query.order_by(Letter.last_at.desc(), Letter.id.desc()).limit(limit)
    return (await session.scalars(query)).all()


async def get_letter(session: AsyncSession, letter_id: UUID) -> DeadLetterRow:
    """Raises `DeadLetterNotFound`."""
    letter: DeadLetterRow | None = await session.scalar(
        select(Letter).where(Letter.id == letter_id)
    )
    if letter is None:
        raise DeadLetterNotFound
    return letter


async def last_times(session: AsyncSession, kind: str) -> dict[UUID, datetime]:
    """Returns when the letters of this kind came last, by their id, open and closed ones."""
    rows = await session.execute(select(Letter.id, Letter.last_at).where(Letter.kind == kind))
    return {letter_id: last_at for letter_id, last_at in rows}


async def delete_open(session: AsyncSession, letter_ids: Collection[UUID]) -> None:
    """Deletes those of these letters that are open: what they report is over."""
    await session.execute(
        delete(DeadLetterRow).where(
            DeadLetterRow.id.in_(letter_ids), DeadLetterRow.closed_at.is_(None)
        )
    )


async def close_letter(session: AsyncSession, letter: DeadLetterRow) -> None:
    """Takes a letter off the list, unless it failed again meanwhile."""
    same = (DeadLetterRow.id == letter.id, DeadLetterRow.last_at == letter.last_at)
    await session.execute(
        update(DeadLetterRow).where(*same).values(closed_at=func.clock_timestamp())
    )


async def count_letters(session: AsyncSession) -> dict[str, int]:
    """Counts the open letters by kind."""
    counts = (
        select(Letter.kind, func.count()).where(Letter.closed_at.is_(None)).group_by(Letter.kind)
    )
    return {kind: count for kind, count in await session.execute(counts.order_by(Letter.kind))}
