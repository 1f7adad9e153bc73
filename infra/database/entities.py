"""Long-lived workflows and schedules that were found missing or paused, and what came of it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import ColumnElement, case, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import EntityFinding

#: The actor of rebuilds in the audit trail.
ACTOR = "orchestrator"
#: Minutes for which what was rebuilt is shown, and its alert lasts.
SHOWN_MINUTES = 60


class FindingState(StrEnum):
    #: Nobody could start it yet.
    MISSING = "missing"
    REBUILT = "rebuilt"
    #: It stays so until somebody resumes it.
    PAUSED = "paused"
    RESUMED = "resumed"
    #: A run that nobody starts again by itself: of a schedule, or a rollout.
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Finding:
    #: A workflow's id, or `schedule:` and a schedule's.
    entity: str
    #: `pool`, `user`, `order`, `schedule` or `run`.
    kind: str
    state: FindingState
    reason: str
    #: The subject in the audit trail.
    subject: str


async def record_finding(session: AsyncSession, finding: Finding) -> bool:
    """Writes a finding; returns whether it is news, which the audit trail then has, too.

    A rebuild is always news: the entity was away before.
    """
    now = func.clock_timestamp()
    row = insert(EntityFinding).values(
        entity=finding.entity, kind=finding.kind, state=finding.state, reason=finding.reason[:500]
    )
    same = EntityFinding.state == row.excluded.state
    known = await session.scalar(select(EntityFinding.state).filter_by(entity=finding.entity))
    await session.execute(
        row.on_conflict_do_update(
            index_elements=["entity"],
            set_={
                "kind": row.excluded.kind,
                "state": row.excluded.state,
                "reason": row.excluded.reason,
                "since": case((same, EntityFinding.since), else_=now),
                "seen_at": now,
            },
        )
    )
    news = known != finding.state or finding.state in (FindingState.REBUILT, FindingState.ENDED)
    if news:
        thing = "schedule" if finding.kind == "schedule" else "workflow"
        audit.append_entry(
            session,
            ACTOR,
            f"{thing}.{finding.state}",
            finding.subject[:160],
            reason=finding.reason[:500],
        )
    return news


async def resume_others(
    session: AsyncSession, paused: Collection[str], *, kinds: Collection[str]
) -> list[str]:
    """Marks as resumed what of these kinds was paused and is no longer among `paused`; returns
    it."""
    return await _resume(
        session, EntityFinding.entity.not_in(paused) & EntityFinding.kind.in_(kinds)
    )


async def resume_entities(session: AsyncSession, entities: Collection[str]) -> list[str]:
    """Marks as resumed what of these was paused; returns it."""
    return await _resume(session, EntityFinding.entity.in_(entities))


async def _resume(session: AsyncSession, which: ColumnElement[bool]) -> list[str]:
    resumed = update(EntityFinding).where(EntityFinding.state == FindingState.PAUSED, which)
    changed = resumed.values(
        state=FindingState.RESUMED, since=func.clock_timestamp(), seen_at=func.clock_timestamp()
    )
    return list(await session.scalars(changed.returning(EntityFinding.entity)))


_RECENT = func.clock_timestamp() - text(f"interval '{SHOWN_MINUTES} minutes'")


async def present_findings(session: AsyncSession, limit: int = 1000) -> Sequence[EntityFinding]:
    """Returns what is paused or missing now, and what was rebuilt or ended within the last hour."""
    lasting = EntityFinding.state.in_((FindingState.PAUSED, FindingState.MISSING))
    recent = EntityFinding.state.in_((FindingState.REBUILT, FindingState.ENDED))
    query = select(EntityFinding).where(or_(lasting, recent & (EntityFinding.seen_at > _RECENT)))
    return (await session.scalars(query.order_by(EntityFinding.seen_at.desc()).limit(limit))).all()


async def finding_of(session: AsyncSession, entity: str) -> tuple[str, str, datetime] | None:
    """Returns state, reason and time of the last finding of an entity."""
    row = await session.get(EntityFinding, entity)
    return None if row is None else (row.state, row.reason, row.seen_at)
