"""Who may trade: set with a reason and an audit entry, read as what counts for a user.

A scope is `all`, `user:<user>` or `account:<user>:<account>`, set by operators, or `self:<user>` and
`self:<user>:<account>`, set by the user: nobody opens what somebody else has closed. The strictest counts.

A later version is a later commit: writers take turns by a lock, under which the version is drawn. So the
newest version among a user's scopes tells which of two pictures of his switches is the newer one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import func, literal, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from infra.database import audit
from infra.database.models import WorkerSession
from infra.database.trading.models import Switch
from worker_runtime.protocol.switches import OPEN, SwitchState, UserSwitch, strictest

EVERYBODY = "all"


class HeldSwitch(NamedTuple):
    """What holds for one scope."""

    scope: str
    state: str
    version: int


@dataclass(frozen=True, slots=True)
class TradingScope:
    """Whom a switch is for: everybody, one user, or one of his accounts."""

    user_id: str = ""
    account_id: str = ""
    #: Set by the user, not by an operator.
    by_user: bool = False

    @property
    def name(self) -> str:
        if not self.user_id:
            return EVERYBODY
        if self.by_user:
            return ":".join(("self", self.user_id, *filter(None, [self.account_id])))
        if self.account_id:
            return f"account:{self.user_id}:{self.account_id}"
        return f"user:{self.user_id}"

    @classmethod
    def of(cls, name: str) -> TradingScope:
        """Neither user ids nor account ids have a colon in them."""
        if name == EVERYBODY:
            return cls()
        kind, user_id, account_id = (*name.split(":"), "")[:3]
        return cls(user_id, account_id, by_user=kind == "self")


async def put_switch(
    session: AsyncSession, scope: TradingScope, state: SwitchState, *, actor: str, reason: str
) -> Switch:
    """Sets one switch, with its entry in the audit trail. Raises nothing for a user who does not exist."""
    lock = select(func.pg_advisory_xact_lock(func.hashtextextended(literal("switches"), 0)))
    await session.execute(lock)
    before = await session.scalar(select(Switch.state).where(Switch.scope == scope.name))
    values = {"state": state.value, "actor": actor, "reason": reason}
    statement = (
        insert(Switch)
        .values(scope=scope.name, **values)
        .on_conflict_do_update(
            index_elements=["scope"],
            set_={
                **values,
                "version": text("nextval('switch_version')"),
                "at": func.clock_timestamp(),
            },
        )
        .returning(Switch)
    )
    row = (await session.execute(statement, execution_options={"populate_existing": True})).scalar_one()
    audit.append_entry(
        session,
        actor=actor,
        action="switch.set",
        subject=f"switch:{scope.name}",
        state=state.value,
        before=before or SwitchState.OPEN.value,
        reason=reason,
        version=row.version,
    )
    await session.flush()
    return row


async def list_switches(session: AsyncSession, user_id: str | None = None) -> list[Switch]:
    """All switches that were ever set, the newest first; with a user, those that can hold for him."""
    found = list(await session.scalars(select(Switch).order_by(Switch.version.desc())))
    return [row for row in found if user_id is None or TradingScope.of(row.scope).user_id in ("", user_id)]


async def switch_of_user(session: AsyncSession, user_id: str) -> UserSwitch:
    """What counts for a user. Read it after the commit of his assignment (see `users_in_scope`)."""
    found = await session.execute(_OF_USER, {"user": user_id})
    return effective_switch(HeldSwitch(*row) for row in found)


async def read_switches(connection: AsyncConnection | AsyncSession) -> SwitchSnapshot:
    """What counts for every user, from one look."""
    return SwitchSnapshot([HeldSwitch(*row) for row in await connection.execute(_ALL)])


async def users_in_scope(session: AsyncSession, scope: TradingScope) -> list[str]:
    """Users of this scope who have a worker, or are about to: to be told after the switch's commit.

    A claim commits its assignment first and reads the switches after that. So either its assignment is seen
    here, or this switch is seen there: none is missed, without a lock on the path of a claim.
    """
    statement = select(WorkerSession.user_id).distinct()
    statement = statement.where(WorkerSession.ended_at.is_(None), WorkerSession.worker_id.is_not(None))
    if scope.user_id:
        statement = statement.where(WorkerSession.user_id == scope.user_id)
    return list(await session.scalars(statement))


def effective_switch(found: Iterable[HeldSwitch]) -> UserSwitch:
    """What counts, of all that can hold for one user."""
    version, every, accounts = 0, SwitchState.OPEN, dict[str, SwitchState]()
    for row in found:
        version, state = max(version, row.version), SwitchState(row.state)
        account_id = TradingScope.of(row.scope).account_id
        if account_id:
            accounts[account_id] = strictest(accounts.get(account_id, SwitchState.OPEN), state)
        else:
            every = strictest(every, state)
    closed = {account_id: state for account_id, state in accounts.items() if state is not SwitchState.OPEN}
    return UserSwitch(version=version, every=every, accounts=closed)


class SwitchSnapshot:
    """All switches at one moment."""

    def __init__(self, found: Collection[HeldSwitch]) -> None:
        self._of_all = [row for row in found if row.scope == EVERYBODY]
        self._by_user: dict[str, list[HeldSwitch]] = {}
        for row in found:
            if user_id := TradingScope.of(row.scope).user_id:
                self._by_user.setdefault(user_id, []).append(row)
        self._others = effective_switch(self._of_all) if self._of_all else OPEN

    def of(self, user_id: str) -> UserSwitch:
        """What counts for this user."""
        own = self._by_user.get(user_id)
        return effective_switch([*self._of_all, *own]) if own else self._others


_ALL = select(Switch.scope, Switch.state, Switch.version)
# By the primary key, with the names of every scope that a user can have: no look at the others' rows.
_OF_USER = text("""
select scope, state, version from switches
 where scope in ('all', 'user\\:' || :user, 'self\\:' || :user)
    or scope in (select kind || account_id
                   from broker_accounts,
                        unnest(array['account\\:' || :user || '\\:', 'self\\:' || :user || '\\:']) as kind
                  where user_id = :user)
""")
