"""The trading switches: who may trade. Each is set with a reason and an audit entry.

A scope is `all`, `user:<user>` or `account:<user>:<account>`, set by operators, or
`self:<user>` and `self:<user>:<account>`, set by the user. The strictest counts, so nobody
opens what another has closed.

A later version is a later commit: writers take turns by a lock under which the version is drawn. So
the newest version among a user's scopes tells which of two of the user's states is the newer one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from infra.database import audit
from infra.database.locks import next_number, wait_for_turn
from infra.database.models import WorkerSession, upsert
from infra.database.trading.models import Switch
from worker_runtime.protocol.requests import OPEN_SWITCH, SwitchState, UserSwitch, strictest

EVERYBODY = "all"


class HeldSwitch(NamedTuple):
    """The switch of one scope."""

    scope: str
    state: str
    version: int


@dataclass(frozen=True, slots=True)
class TradingScope:
    """Says what a switch applies to: everybody, one user, or one account."""

    user_id: str = ""
    account_id: str = ""
    #: Set by the user, not by an operator.
    by_user: bool = False

    @property
    def name(self) -> str:
        if not self.user_id:
            return EVERYBODY
        kind = "self" if self.by_user else "account" if self.account_id else "user"
        return ":".join(filter(None, (kind, self.user_id, self.account_id)))

    @classmethod
    def parse(cls, name: str) -> TradingScope:
        """Reads a scope's name; user and account ids contain no colon."""
        if name == EVERYBODY:
            return cls()
        kind, user_id, account_id = (*name.split(":"), "")[:3]
        return cls(user_id, account_id, by_user=kind == "self")


async def put_switch(
    session: AsyncSession, scope: TradingScope, state: SwitchState, *, actor: str, reason: str
) -> Switch:
    """Sets one switch with its audit entry; does not check that the user exists."""
    await wait_for_turn(session, "switches")
    before = await session.scalar(select(Switch.state).where(Switch.scope == scope.name))
    version = await session.scalar(select(next_number("switch_version")))
    values = {"state": state.value, "actor": actor, "reason": reason, "version": version}
    statement = upsert(Switch, {"scope": scope.name}, values, at=func.clock_timestamp()).returning(
        Switch
    )
    row = (
        await session.execute(statement, execution_options={"populate_existing": True})
    ).scalar_one()
    about = {"before": before or SwitchState.OPEN.value, "reason": reason, "version": row.version}
    audit.append_entry(
        session, actor, "switch.set", f"switch:{scope.name}", state=state.value, **about
    )
    await session.flush()
    return row


async def list_switches(
    session: AsyncSession,
    user_id: str | None = None,
    *,
    prefix: str | None = None,
    state: str | None = None,
    before: int | None = None,
    limit: int | None = None,
) -> Sequence[Switch]:
    """Returns switches, the newest first: with `user_id`, those that can apply to this user;
    with `prefix`, those of users whose ids begin with it; with `before`, those that are
    older than this version."""
    query, whose = select(Switch).order_by(Switch.version.desc()).limit(limit), _USER_OF_SCOPE
    if user_id is not None:
        query = query.where(whose.in_(("", user_id)))
    if prefix is not None:
        query = query.where(whose.startswith(prefix, autoescape=True))
    if state is not None:
        query = query.where(Switch.state == state)
    if before is not None:
        query = query.where(Switch.version < before)
    return (await session.scalars(query)).all()


async def holding_switch(
    session: AsyncSession, user_id: str, account_id: str = "", *, but: str = ""
) -> Switch | None:
    """Returns the switch that keeps this user,
    or only this account, from trading freely; None: none does.

    Of several the strictest, and of equally strict ones
    the one that was set last. `but`: not this scope.
    """
    whom = [(account, own) for account in ("", account_id) for own in (False, True)]
    scopes = {TradingScope(user_id, account, by_user=own).name for account, own in whom}
    rows = await session.scalars(
        select(Switch)
        .where(
            Switch.scope.in_({EVERYBODY, *scopes} - {but}), Switch.state != SwitchState.OPEN.value
        )
        .order_by(Switch.version.desc())
    )
    return max(rows, key=lambda row: row.state == SwitchState.HALTED, default=None)


def described(row: Switch) -> str:
    """Says whom a switch closes, who set it, when (UTC) and why, in words."""
    scope = TradingScope.parse(row.scope)
    whom = " ".join(filter(None, (scope.user_id, scope.account_id))) or "everybody"
    person = "the user" if scope.by_user else audit.person_of(row.actor)
    return f"{whom} is {row.state} by {person} since {row.at:%Y-%m-%d %H:%M:%S} UTC: {row.reason}"


async def switch_of_user(session: AsyncSession, user_id: str) -> UserSwitch:
    """Returns a user's effective switch. A claim reads it after its commit (see
    `users_in_scope`)."""
    rows = await session.execute(_OF_USER, {"user": user_id})
    return effective_switch(HeldSwitch(*row) for row in rows)


async def read_switches(connection: AsyncConnection | AsyncSession) -> SwitchSnapshot:
    return SwitchSnapshot([HeldSwitch(*row) for row in await connection.execute(_ALL)])


async def users_in_scope(session: AsyncSession, scope: TradingScope) -> list[str]:
    """Returns the users of a scope who have a worker.
    Call it after the commit of the scope's switch.

    A claim commits its assignment before it reads the switches. So either this function sees the
    assignment or the claim sees the switch, without a lock.
    """
    users = select(WorkerSession.user_id).distinct().where(WorkerSession.worker_id.is_not(None))
    whose = {"user_id": scope.user_id} if scope.user_id else {}
    return list(await session.scalars(users.filter_by(ended_at=None, **whose)))


def effective_switch(held: Iterable[HeldSwitch]) -> UserSwitch:
    """Combines all switches that apply to one user; the strictest counts."""
    version, every, accounts = 0, SwitchState.OPEN, dict[str, SwitchState]()
    for row in held:
        version, state = max(version, row.version), SwitchState(row.state)
        account_id = TradingScope.parse(row.scope).account_id
        if account_id:
            accounts[account_id] = strictest(accounts.get(account_id, SwitchState.OPEN), state)
        else:
            every = strictest(every, state)
    closed = {
        account_id: state for account_id, state in accounts.items() if state is not SwitchState.OPEN
    }
    return UserSwitch(version=version, every=every, accounts=closed)


class SwitchSnapshot:
    """All switches at one moment."""

    def __init__(self, held: Collection[HeldSwitch]) -> None:
        self._of_all = [row for row in held if row.scope == EVERYBODY]
        self._by_user: dict[str, list[HeldSwitch]] = {}
        for row in held:
            if user_id := TradingScope.parse(row.scope).user_id:
                self._by_user.setdefault(user_id, []).append(row)
        self._others = effective_switch(self._of_all) if self._of_all else OPEN_SWITCH

    def for_user(self, user_id: str) -> UserSwitch:
        own = self._by_user.get(user_id)
        return effective_switch([*self._of_all, *own]) if own else self._others


#: In SQL: the user of a scope; empty for everybody.
_USER_OF_SCOPE = func.split_part(Switch.scope, ":", 2)
_ALL = select(Switch.scope, Switch.state, Switch.version)
# Finds the rows of every scope that a user can have by the primary key.
_OF_USER = text("""
select scope, state, version from switches
 where scope in ('all', 'user\\:' || :user, 'self\\:' || :user)
    or scope in (select kind || account_id
                   from broker_accounts,
                        unnest(array['account\\:' || :user || '\\:',
                                     'self\\:' || :user || '\\:']) as kind
                  where user_id = :user)
""")
