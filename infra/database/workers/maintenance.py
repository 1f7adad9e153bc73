"""What maintenance reads of the assignments, and what it writes down of each of its passes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ARRAY, String, bindparam, text
from sqlalchemy.ext.asyncio import AsyncSession

#: Days that passes are kept.
KEPT_DAYS = 2


class AssignmentRow(NamedTuple):
    """One row of `worker_sessions`, as far as maintenance needs it."""

    claim_id: str
    user_id: str
    #: '': the claim never got one.
    worker_id: str
    task_id: str
    epoch: int
    pool: str
    #: No later assignment of the user exists.
    present: bool
    connected: bool
    ended: bool
    #: Seconds since it was claimed, or assigned, by PostgreSQL's clock; of an ended one: since its end.
    age: float


class Suspect(msgspec.Struct, frozen=True):
    """One thing that is not as it should be. Two looks see the same one when all of it is equal."""

    kind: str
    why: str
    user_id: str = ""
    worker_id: str = ""
    #: The task to stop; '': none is known to run.
    task_id: str = ""
    claim_id: str = ""
    epoch: int = 0
    pool: str = ""
    #: What stood in Valkey: only this is deleted.
    value: str = ""


@dataclass(frozen=True, kw_only=True)
class PassBasis:
    """What must not have changed between two passes that are believed."""

    #: Valkey's generation, and the id of its process.
    generation: str = ""
    server: str = ""
    #: Tasks that the launcher listed.
    tasks: int = 0


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """One pass over all workers, as it was written down."""

    id: int
    place: PassBasis
    #: Seconds since it began, by PostgreSQL's clock.
    age: float
    #: The host's boot, and seconds since then: a clock that nobody sets.
    boot: str
    boottime: float
    guarded: str
    suspects: tuple[Suspect, ...] = ()


_COLUMNS = """
select s.claim_id, s.user_id, coalesce(s.worker_id, ''), coalesce(s.task_id, ''), s.epoch, s.pool,
       s.epoch = u.epoch, s.connected_at is not null, s.ended_at is not null,
       extract(epoch from clock_timestamp() - coalesce(s.ended_at, s.claimed_at, s.assigned_at))::float8
  from worker_sessions s join users u on u.id = s.user_id
"""
_STRINGS = ARRAY(String)
_OPEN = text(_COLUMNS + " where s.ended_at is null")
_OPEN_OF = text(
    _COLUMNS + " where s.ended_at is null and "
    "(s.user_id = any(:users) or s.worker_id = any(:workers) or s.claim_id = any(:claims))"
).bindparams(
    bindparam("users", type_=_STRINGS),
    bindparam("workers", type_=_STRINGS),
    bindparam("claims", type_=_STRINGS),
)
_ENDED = text(
    f"select distinct on (found.worker_id) found.* from ({_COLUMNS} where s.worker_id = any(:workers)) "  # noqa: S608
    "as found(claim_id, user_id, worker_id, task_id, epoch, pool, present, connected, ended, age) "
    "order by found.worker_id, found.epoch desc"
).bindparams(bindparam("workers", type_=_STRINGS))


async def open_assignments(session: AsyncSession) -> list[AssignmentRow]:
    """All that are not over: one query, over a partial index."""
    return [AssignmentRow(*row) for row in await session.execute(_OPEN)]


async def open_assignments_of(
    session: AsyncSession, users: Collection[str], workers: Collection[str], claims: Collection[str]
) -> list[AssignmentRow]:
    """Those of some users, workers and claims."""
    wanted = {"users": list(users), "workers": list(workers), "claims": list(claims)}
    return [AssignmentRow(*row) for row in await session.execute(_OPEN_OF, wanted)]


async def last_assignments(session: AsyncSession, workers: Collection[str]) -> dict[str, AssignmentRow]:
    """Worker → its last assignment, open or ended; without those that never had one."""
    if not workers:
        return {}
    found = await session.execute(_ENDED, {"workers": list(workers)})
    return {row[2]: AssignmentRow(*row) for row in found}


_BEFORE_CALL = text(
    "select user_id, cast(id as text) from orders "
    "where user_id = any(:users) and state in ('accepted', 'queued', 'submitting') "
    "and created_at > clock_timestamp() - interval '2 days'"
).bindparams(bindparam("users", type_=_STRINGS))


async def orders_before_their_answer(session: AsyncSession, users: Collection[str]) -> list[tuple[str, str]]:
    """`(user, order)` of those that a worker may have in hand: their journal entries tell."""
    return [(row[0], row[1]) for row in await session.execute(_BEFORE_CALL, {"users": list(users)})]


_CLOSE = text(
    "update worker_sessions s "
    "set ended_at = clock_timestamp(), end_reason = coalesce(s.end_reason, given.reason) "
    "from unnest(cast(:claims as text[]), cast(:reasons as text[])) as given(claim_id, reason) "
    "where s.claim_id = given.claim_id and s.ended_at is null"
).bindparams(bindparam("claims", type_=_STRINGS), bindparam("reasons", type_=_STRINGS))


async def close_assignments(session: AsyncSession, reasons: Mapping[str, str]) -> None:
    """Claim → why its assignment is over. One that is over already keeps its time and reason."""
    await session.execute(_CLOSE, {"claims": list(reasons), "reasons": list(reasons.values())})


# --- passes -----------------------------------------------------------------------------------------


_PASSED_ROWS = """
select id, generation, server, tasks, boot, boottime, guarded, suspects,
       extract(epoch from clock_timestamp() - began_at)::float8
  from maintenance_passes
"""
_LAST_PASS = text(_PASSED_ROWS + " order by id desc limit 1")
_PASS_OF = text(_PASSED_ROWS + " where id = :id")


async def last_pass(session: AsyncSession) -> PassRecord | None:
    """The latest pass, with its suspects."""
    return _pass_of_row((await session.execute(_LAST_PASS)).one_or_none())


async def pass_of(session: AsyncSession, number: int) -> PassRecord | None:
    return _pass_of_row((await session.execute(_PASS_OF, {"id": number})).one_or_none())


def _pass_of_row(row: Any) -> PassRecord | None:
    if row is None:
        return None
    return PassRecord(
        id=row[0],
        place=PassBasis(generation=row[1], server=row[2], tasks=row[3]),
        boot=row[4],
        boottime=row[5],
        guarded=row[6],
        suspects=tuple(msgspec.convert(row[7], list[Suspect])),
        age=row[8],
    )


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
    """Writes a pass down; returns its number. Old ones go."""
    found = list(suspects)
    counts: dict[str, int] = {}
    for one in found:
        counts[one.kind] = counts.get(one.kind, 0) + 1
    await session.execute(
        text(
            "delete from maintenance_passes where began_at < clock_timestamp() - make_interval(days => :kept)"
        ),
        {"kept": KEPT_DAYS},
    )
    number = await session.scalar(
        text(
            "insert into maintenance_passes (generation, server, tasks, boot, boottime, scanned, "
            "scan_seconds, guarded, found, suspects, confirmed) values (:generation, :server, :tasks, :boot, "
            ":boottime, :scanned, :scan, :guarded, cast(:found as jsonb), cast(:suspects as jsonb), "
            "cast(:confirmed as jsonb)) returning id"
        ),
        {
            "generation": place.generation,
            "server": place.server,
            "tasks": place.tasks,
            "boot": boot,
            "boottime": boottime,
            "scanned": scanned,
            "scan": scan_seconds,
            "guarded": guarded,
            "found": msgspec.json.encode(counts).decode(),
            "suspects": msgspec.json.encode(found).decode(),
            "confirmed": msgspec.json.encode(list(confirmed)).decode(),
        },
    )
    return int(number)


async def confirmed_batch(session: AsyncSession, number: int, first: int, count: int) -> list[Suspect]:
    """Some of the suspects of a pass that two looks have seen."""
    found = await session.scalar(
        text(
            "select coalesce(jsonb_agg(one order by place), '[]') from maintenance_passes, "
            "jsonb_array_elements(confirmed) with ordinality as each(one, place) "
            "where id = :id and place > :first and place <= :last"
        ),
        {"id": number, "first": first, "last": first + count},
    )
    return msgspec.convert(found, list[Suspect])


async def finish_pass(session: AsyncSession, number: int, outcomes: dict[str, int]) -> float:
    """Writes down what came of it; returns its seconds from begin to end."""
    taken = await session.scalar(
        text(
            "update maintenance_passes set outcomes = cast(:outcomes as jsonb), "
            "finished_at = clock_timestamp() where id = :id "
            "returning extract(epoch from finished_at - began_at)::float8 + scan_seconds"
        ),
        {"id": number, "outcomes": msgspec.json.encode(outcomes).decode()},
    )
    return float(taken or 0.0)


@dataclass(frozen=True, kw_only=True)
class PassSummary:
    """The last pass, for operators."""

    began_at: Any
    scanned: int
    scan_seconds: float
    total_seconds: float | None
    guarded: str
    found: dict[str, int]
    outcomes: dict[str, int]


async def pass_summary(session: AsyncSession) -> PassSummary | None:
    row = (
        await session.execute(
            text(
                "select began_at, scanned, scan_seconds, "
                "extract(epoch from finished_at - began_at)::float8 + scan_seconds, "
                "guarded, found, outcomes from maintenance_passes order by id desc limit 1"
            )
        )
    ).one_or_none()
    if row is None:
        return None
    return PassSummary(
        began_at=row[0],
        scanned=row[1],
        scan_seconds=row[2],
        total_seconds=row[3],
        guarded=row[4],
        found=row[5],
        outcomes=row[6],
    )
