"""Whose calls at the broker are counted together, and users who log in there as one person.

A budget belongs to one user and one person that this user's credentials name. Nobody is charged
because somebody else names the same person. When workers have logged in as one person for two
users, an operator decides whether these two share a budget: a worker speaks for its own user only,
so neither login proves anything about the other.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import array
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.locks import take_turn, wait_for_turn
from infra.database.models import BrokerAccount, PersonMatch, StoredCredentials, WorkerSession
from worker_runtime.protocol.errors import BerthError

#: A session that ended earlier has no calls in any window that still counts: the longest is a day.
_MAX_SESSION_AGE = timedelta(days=1)
#: Credentials whose persons are looked for in one transaction.
_MAX_MATCHES_PER_TRANSACTION = 100
#: A user who had a worker within this time counts as one who shares the address.
_ADDRESS_USED_WITHIN = timedelta(days=7)


class PersonMatchNotFound(BerthError, code="PERSON_MATCH_NOT_FOUND", status=404):
    """There is no such pair of users."""


class SharedBudget(NamedTuple):
    """A budget that the user shares with others, for calls as one of these persons."""

    broker: str
    persons: Collection[str]
    number: int


@dataclass(frozen=True)
class BudgetFacts:
    """Holds what the database says about the budgets of one assignment."""

    shared: Sequence[SharedBudget] = ()
    #: The user's worker before was claimed by 0.1.0 and may have calls in windows that still count.
    counted_by_person: bool = False


class SealedPerson(NamedTuple):
    """The person whom the credentials of an account name."""

    version: int
    #: As in `StoredCredentials.persons`.
    hashes: Sequence[str]


async def read_budget_facts(
    session: AsyncSession, user_id: str, epoch: int, *, reload: bool = False
) -> BudgetFacts:
    """Reads what decides under which names the worker
    of this epoch counts; a repeat finds the same.

    `reload`: the worker has its names already, from this release or from 0.1.0.
    """
    matches = await session.scalars(
        select(PersonMatch).where(_is_of(user_id), PersonMatch.shared_budget.is_not(None))
    )
    shared = [SharedBudget(row.broker, row.persons, row.shared_budget or 0) for row in matches]
    last = WorkerSession.epoch <= epoch if reload else WorkerSession.epoch < epoch
    before = await session.scalar(
        select(WorkerSession)
        .where(WorkerSession.user_id == user_id, last)
        .where(WorkerSession.connected_at.is_not(None))
        .order_by(WorkerSession.epoch.desc())
        .limit(1)
    )
    recent = select(func.clock_timestamp() - _MAX_SESSION_AGE)
    counted_by_person = (
        before is not None
        and before.budgets is None
        and (before.ended_at is None or before.ended_at > (await session.scalars(recent)).one())
    )
    return BudgetFacts(shared, counted_by_person)


async def count_address_users(session: AsyncSession) -> int:
    """Counts the users who had a worker in the last days:
    the address's budget is divided among them."""
    recent = or_(
        WorkerSession.ended_at.is_(None),
        WorkerSession.ended_at > func.now() - _ADDRESS_USED_WITHIN,
    )
    users = await session.scalar(select(func.count(WorkerSession.user_id.distinct())).where(recent))
    return int(users or 0)


async def note_sealed(
    session: AsyncSession,
    user_id: str,
    epoch: int,
    names: Collection[str],
    persons: Mapping[str, SealedPerson],
    *,
    reload: bool = False,
) -> list[str] | None:
    """Records what is about to be sent to the worker of this epoch. Returns all names that the
    worker may use; None if release 0.1.0 claimed it and it uses that release's names.

    `persons`: by account id.
    """
    # First the credentials, then the assignment: the recorder takes them in this order.
    for account_id, person in sorted(persons.items()):
        await session.execute(
            update(StoredCredentials)
            .filter_by(user_id=user_id, account_id=account_id, version=person.version)
            .values(persons=list(person.hashes), sealed_version=person.version)
        )
    query = select(WorkerSession).filter_by(user_id=user_id, epoch=epoch)
    assignment = await session.scalar(query.with_for_update(key_share=True))
    allowed: list[str] | None = None
    if assignment is not None and (assignment.budgets is not None or not reload):
        assignment.budgets = allowed = sorted({*(assignment.budgets or ()), *names})
    # After a rotation of the key a link is known under the new hashes, too.
    linked = select(PersonMatch).where(_is_of(user_id))
    for match in await session.scalars(linked.order_by(PersonMatch.id).with_for_update()):
        for person in persons.values():
            if not set(match.persons).isdisjoint(person.hashes):
                match.persons = sorted({*match.persons, *person.hashes})
    return allowed


def note_confirmed(confirmed: Iterable[StoredCredentials]) -> None:
    """Records that these credentials have logged in. `find_matches` looks later who else is the
    same person: whoever records logins holds the rows of several users."""
    for worker in confirmed:
        if worker.sealed_version == worker.version and worker.confirmed_version != worker.version:
            worker.confirmed_version, worker.match_due = worker.version, True


async def find_matches(session: AsyncSession) -> bool:
    """Looks for other users whose logins name the same person as the next ones that were confirmed:
    each such pair waits for an operator once. Returns whether there may be more."""
    if not await take_turn(session, "person matches"):
        return False  # another orchestrator looks
    due = select(StoredCredentials).where(StoredCredentials.match_due)
    due = due.order_by(StoredCredentials.user_id, StoredCredentials.account_id).limit(
        _MAX_MATCHES_PER_TRANSACTION
    )
    locked = due.with_for_update(key_share=True, skip_locked=True, of=StoredCredentials)
    matches = (await session.scalars(locked)).all()
    for match in matches:
        match.match_due = False
        if match.confirmed_version == match.version:
            for user_id in await _users_of_person(session, match):
                await _note_match(session, match, user_id)
    return len(matches) == _MAX_MATCHES_PER_TRANSACTION


async def _users_of_person(session: AsyncSession, credentials: StoredCredentials) -> Sequence[str]:
    """Returns other users whose confirmed credentials at the same broker name the same person."""
    same_account = and_(
        BrokerAccount.user_id == StoredCredentials.user_id,
        BrokerAccount.account_id == StoredCredentials.account_id,
    )
    users = await session.scalars(
        select(StoredCredentials.user_id)
        .distinct()
        .join(BrokerAccount, same_account)
        .where(StoredCredentials.persons.has_any(array(credentials.persons)))
        .where(StoredCredentials.user_id != credentials.user_id)
        .where(StoredCredentials.confirmed_version == StoredCredentials.version)
        .where(BrokerAccount.broker == credentials.account.broker)
    )
    return users.all()


async def _note_match(session: AsyncSession, credentials: StoredCredentials, other: str) -> None:
    first, second = sorted((credentials.user_id, other))
    broker, persons = credentials.account.broker, credentials.persons
    pair = select(PersonMatch.id).filter_by(broker=broker, first_user=first, second_user=second)
    if (
        await session.scalar(pair.where(PersonMatch.persons.has_any(array(persons))).limit(1))
        is None
    ):
        session.add(
            PersonMatch(broker=broker, first_user=first, second_user=second, persons=persons)
        )
        await session.flush()


async def list_matches(
    session: AsyncSession, *, resolved: bool = False, after: int = 0, limit: int = 100
) -> Sequence[PersonMatch]:
    """Returns pairs after the number `after`, the oldest first;
    without `resolved` only those that wait."""
    query = select(PersonMatch).where(PersonMatch.id > after).order_by(PersonMatch.id).limit(limit)
    if not resolved:
        query = query.where(PersonMatch.resolved_at.is_(None))
    return (await session.scalars(query)).all()


async def resolve_match(
    session: AsyncSession, number: int, *, share_budget: bool, actor: str, reason: str
) -> PersonMatch:
    """Lets both users share a budget, or keeps them apart; may be decided again. In force when each
    user's worker gets its credentials the next time. Raises `PersonMatchNotFound`."""
    await wait_for_turn(session, "person matches")
    match = await session.get(PersonMatch, number)
    if match is None:
        raise PersonMatchNotFound(f"there is no pair of users {number}")
    match.shared_budget = await _join(session, match) if share_budget else None
    match.resolved_at, match.resolved_by = func.clock_timestamp(), actor
    await session.flush()
    await session.refresh(match)
    action = "person_match.linked" if share_budget else "person_match.kept_apart"
    users = [match.first_user, match.second_user]
    audit.append_entry(
        session,
        actor,
        action,
        f"person_match:{number}",
        users=users,
        broker=match.broker,
        reason=reason,
    )
    return match


async def _join(session: AsyncSession, match: PersonMatch) -> int:
    """Returns the number of the budget that both users get: the oldest one that either has for this
    person."""
    neighbours = await session.scalars(
        select(PersonMatch.shared_budget)
        .where(or_(_is_of(match.first_user), _is_of(match.second_user)))
        .where(PersonMatch.broker == match.broker, PersonMatch.shared_budget.is_not(None))
        .where(PersonMatch.persons.has_any(array(match.persons)))
    )
    joined = {match.id, *(number for number in neighbours if number is not None)}
    others = update(PersonMatch).where(PersonMatch.shared_budget.in_(joined))
    await session.execute(others.values(shared_budget=min(joined)))
    return min(joined)


async def forget_matches(session: AsyncSession, user_id: str) -> None:
    """Deletes a user's matches when the user is removed for good."""
    await session.execute(delete(PersonMatch).where(_is_of(user_id)))


def _is_of(user_id: str) -> ColumnElement[bool]:
    return or_(PersonMatch.first_user == user_id, PersonMatch.second_user == user_id)
