"""Certificates of broker accounts that expire: whom to warn, and that it was done."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import BrokerAccount, StatementAddress, StoredCredentials, User

#: Days ahead at which a user is warned; 0: it has expired.
WARNING_DAYS = (30, 7, 1, 0)
#: Columns of an account with new credentials whose certificate nobody has read.
UNKNOWN: dict[str, Any] = {"certificate_expires_at": None, "certificate_warned_days": None}
#: Two readings of one certificate may differ by the hours
#: of a zone that a broker's SDK does not name.
_MAX_READING_DIFFERENCE = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class CertificateWarning:
    """A warning to one user. `days` is of `WARNING_DAYS`."""

    user_id: str
    account_id: str
    broker: str
    version: int
    days: int
    expires_at: datetime
    email: str | None = None
    webhook_url: str | None = None


async def set_expiry(
    session: AsyncSession, user_id: str, account_id: str, expires_at: datetime
) -> None:
    """Stores what the certificate of an account's new credentials says."""
    values = {"certificate_expires_at": expires_at, "certificate_warned_days": None}
    rows = update(BrokerAccount).filter_by(user_id=user_id, account_id=account_id)
    await session.execute(rows.values(**values))


def warning_due(expires_at: datetime, now: datetime) -> int | None:
    """Returns the last of `WARNING_DAYS` that has been reached; None: none has."""
    reached = [days for days in WARNING_DAYS if expires_at - now <= timedelta(days=days)]
    return min(reached, default=None)


def note_reported(account: BrokerAccount, ends: datetime) -> None:
    """Stores what a worker's session says of the certificate in use,
    unless we have read the same one."""
    known = account.certificate_expires_at
    if known is None or abs(known - ends) > _MAX_READING_DIFFERENCE:
        account.certificate_expires_at, account.certificate_warned_days = ends, None


async def list_certificates(
    session: AsyncSession, *, within_days: int, limit: int = 100
) -> Sequence[BrokerAccount]:
    """Returns live accounts whose certificates have
    expired or expire within so many days, soonest first."""
    until = func.clock_timestamp() + timedelta(days=within_days)
    query = select(BrokerAccount).where(
        BrokerAccount.simulation.is_(False), BrokerAccount.certificate_expires_at <= until
    )
    return (
        await session.scalars(query.order_by(BrokerAccount.certificate_expires_at).limit(limit))
    ).all()


async def take_warnings(session: AsyncSession, *, limit: int = 50) -> Sequence[CertificateWarning]:
    """Returns warnings that are due and marks them as given,
    with an entry in each user's audit trail.

    Their accounts stay locked until the transaction ends;
    those that another process holds are left to it.
    """
    now = await session.scalar(select(func.clock_timestamp()))
    if now is None:
        return []
    account = BrokerAccount
    warned = account.certificate_warned_days
    due = [
        (account.certificate_expires_at <= now + timedelta(days=days))
        & (or_(warned.is_(None), warned > days))
        for days in WARNING_DAYS
    ]
    query = (
        select(account, StoredCredentials.version, StatementAddress)
        .join(User, User.id == account.user_id)
        .join(
            StoredCredentials,
            (StoredCredentials.user_id == account.user_id)
            & (StoredCredentials.account_id == account.account_id),
        )
        .outerjoin(StatementAddress, StatementAddress.user_id == account.user_id)
        .where(account.simulation.is_(False), User.disabled_at.is_(None), or_(*due))
        .order_by(account.certificate_expires_at)
        .limit(limit)
        .with_for_update(of=account, skip_locked=True)
    )
    warnings = []
    for row, version, addresses in await session.execute(query):
        ends = row.certificate_expires_at
        days = None if ends is None else warning_due(ends, now)
        if ends is None or days is None:
            continue
        row.certificate_warned_days = days
        subject = f"account:{row.user_id}/{row.account_id}"
        expires = ends.isoformat(timespec="seconds")
        audit.append_entry(
            session, "maintenance", "certificate.expires", subject, days=days, expires_at=expires
        )
        warnings.append(
            CertificateWarning(
                user_id=row.user_id,
                account_id=row.account_id,
                broker=row.broker,
                version=version,
                days=days,
                expires_at=ends,
                email=addresses.email if addresses else None,
                webhook_url=addresses.webhook_url if addresses else None,
            )
        )
    return warnings
