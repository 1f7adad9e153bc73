"""The passes of maintenance: what each one found and what came of it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import BigInteger, Identity, String, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, defer, mapped_column

from infra.database.models import Base

#: Why a pass did nothing that could not list the tasks.
LAUNCHER_UNREAD = "the launcher could not be read"


class MaintenancePass(Base):
    """A pass of maintenance over all workers: its suspects, the confirmed ones, and what was
    done."""

    __tablename__ = "maintenance_passes"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    began_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: Valkey's generation and the id of its process; empty if they could not be read.
    generation: Mapped[str] = mapped_column(String(64))
    server: Mapped[str] = mapped_column(String(64))
    #: Tasks that the launcher listed.
    tasks: Mapped[int]
    #: Boot of the host, and seconds since then.
    boot: Mapped[str] = mapped_column(String(64))
    boottime: Mapped[float]
    #: Workers that were checked.
    scanned: Mapped[int]
    scan_seconds: Mapped[float]
    #: Why nothing may be done; empty if it may.
    guarded: Mapped[str] = mapped_column(String(64))
    #: Counts by kind of anomaly.
    found: Mapped[dict[str, Any]]
    suspects: Mapped[list[Any]] = mapped_column(JSONB)
    confirmed: Mapped[list[Any]] = mapped_column(JSONB)
    #: Counts by action taken.
    outcomes: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    finished_at: Mapped[datetime | None]

    @property
    def total_seconds(self) -> float | None:
        """Seconds of the scan and of what followed; None while the pass runs."""
        if self.finished_at is None:
            return None
        return (self.finished_at - self.began_at).total_seconds() + self.scan_seconds


class Suspect(msgspec.Struct, frozen=True):
    """An anomaly. Two passes have seen the same one when all its fields are equal."""

    kind: str
    why: str
    user_id: str = ""
    worker_id: str = ""
    #: The task to stop; empty: none is known to run.
    task_id: str = ""
    claim_id: str = ""
    epoch: int = 0
    pool: str = ""
    #: The value found in Valkey: it is deleted only if it is still the same.
    value: str = ""


@dataclass(frozen=True, kw_only=True)
class PassBasis:
    """Holds what must be equal in two passes before their common suspects are acted on."""

    #: Valkey's generation, and the id of its process.
    generation: str = ""
    server: str = ""
    #: Tasks that the launcher listed.
    tasks: int = 0


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """A pass over all workers, as it was recorded."""

    id: int
    place: PassBasis
    #: Seconds since it began, by PostgreSQL's clock.
    age: float
    #: The host's boot id, and seconds since the boot: a clock that cannot be set.
    boot: str
    boottime: float
    guarded: str
    suspects: tuple[Suspect, ...] = ()


async def latest_pass(session: AsyncSession, *, older_than: float = 0.0) -> PassRecord | None:
    """Returns the latest pass that began more than `older_than` seconds ago."""
    age = func.extract("epoch", func.clock_timestamp() - MaintenancePass.began_at)
    query = select(MaintenancePass, age).order_by(MaintenancePass.id.desc()).limit(1)
    if older_than:
        query = query.where(age > older_than)
    latest = (await session.execute(query)).one_or_none()
    if latest is None:
        return None
    row, seconds = latest
    return PassRecord(
        id=row.id,
        place=PassBasis(generation=row.generation, server=row.server, tasks=row.tasks),
        boot=row.boot,
        boottime=row.boottime,
        guarded=row.guarded,
        suspects=msgspec.convert(row.suspects, tuple[Suspect, ...]),
        age=float(seconds),
    )


async def basis_of_pass(session: AsyncSession, number: int) -> PassBasis | None:
    """Returns what the pass with this number was based on,
    without reading its lists of suspects."""
    columns = MaintenancePass.generation, MaintenancePass.server, MaintenancePass.tasks
    row = (
        await session.execute(select(*columns).where(MaintenancePass.id == number))
    ).one_or_none()
    return None if row is None else PassBasis(**row._asdict())


async def begin_pass(
    session: AsyncSession,
    *,
    place: PassBasis,
    boot: str,
    boottime: float,
    scanned: int,
    scan_seconds: float,
    guarded: str,
    suspects: Iterable[Suspect],
    confirmed: Sequence[Suspect],
) -> int:
    """Records a pass and returns its number."""
    suspected = list(suspects)
    row = MaintenancePass(
        **asdict(place),
        boot=boot,
        boottime=boottime,
        scanned=scanned,
        scan_seconds=scan_seconds,
        guarded=guarded,
        found=dict(Counter(suspect.kind for suspect in suspected)),
        suspects=msgspec.to_builtins(suspected),
        confirmed=msgspec.to_builtins(confirmed),
    )
    session.add(row)
    await session.flush()
    return row.id


async def confirmed_batch(
    session: AsyncSession, number: int, first: int, count: int
) -> list[Suspect]:
    """Returns `count` confirmed suspects of a pass, from number `first` on."""
    batch = await session.scalar(
        text(
            "select jsonb_path_query_array(confirmed, '$[$first to $last]', "
            "jsonb_build_object('first', cast(:first as int), 'last', cast(:last as int))) "
            "from maintenance_passes where id = :id"
        ),
        {"id": number, "first": first, "last": first + count - 1},
    )
    return msgspec.convert(batch or [], list[Suspect])


async def finish_pass(session: AsyncSession, number: int, outcomes: dict[str, int]) -> float:
    """Records what came of a pass; returns the seconds that it took."""
    finished = (
        update(MaintenancePass).where(MaintenancePass.id == number).returning(MaintenancePass)
    )
    finished = finished.values(outcomes=outcomes, finished_at=func.clock_timestamp())
    row = await session.scalar(finished.execution_options(populate_existing=True))
    return (row.total_seconds if row else None) or 0.0


async def pass_summary(session: AsyncSession) -> MaintenancePass | None:
    """Returns the latest pass for operators."""
    return next(iter(await list_passes(session, limit=1)), None)


async def list_passes(
    session: AsyncSession, *, odd: bool = False, limit: int = 100
) -> Sequence[MaintenancePass]:
    """Returns the latest passes, the newest first, without their lists of suspects; `odd`: only
    those that found something, or did nothing for want of trust."""
    lists = defer(MaintenancePass.suspects), defer(MaintenancePass.confirmed)
    query = select(MaintenancePass).options(*lists).order_by(MaintenancePass.id.desc()).limit(limit)
    if odd:
        query = query.where(
            or_(MaintenancePass.found != text("'{}'"), MaintenancePass.guarded != "")
        )
    return (await session.scalars(query.execution_options(populate_existing=True))).all()
