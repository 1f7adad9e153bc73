"""Broker accounts and their encrypted credentials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import BrokerAccount, EncryptedCredentials, StoredCredentials
from worker_runtime.protocol.errors import UnknownAccount

_KEY = ["user_id", "account_id"]


async def put_account(
    session: AsyncSession,
    *,
    user_id: str,
    account_id: str,
    broker: str,
    broker_type: str,
    simulation: bool,
    encrypted: EncryptedCredentials,
) -> int:
    """Stores an account with new credentials; returns their version, which grows by one each time."""
    shown = {"broker": broker, "broker_type": broker_type, "simulation": simulation}
    account = insert(BrokerAccount).values(user_id=user_id, account_id=account_id, **shown)
    await session.execute(account.on_conflict_do_update(index_elements=_KEY, set_=shown))
    values = asdict(encrypted)
    stored = insert(StoredCredentials).values(user_id=user_id, account_id=account_id, version=1, **values)
    version = await session.scalar(
        stored.on_conflict_do_update(
            index_elements=_KEY,
            set_={**values, "version": StoredCredentials.version + 1, "updated_at": func.now()},
        ).returning(StoredCredentials.version)
    )
    return int(version or 0)


async def require_account(session: AsyncSession, user_id: str, account_id: str) -> None:
    """Raises `UnknownAccount` if the user does not have this account, with or without credentials."""
    if await session.get(BrokerAccount, (user_id, account_id)) is None:
        raise UnknownAccount(f"user {user_id} has no account {account_id}")


async def accounts_of_user(session: AsyncSession, user_id: str) -> Sequence[StoredCredentials]:
    """Returns the credentials of all accounts of a user, by account id."""
    stored = select(StoredCredentials).where(StoredCredentials.user_id == user_id)
    return (await session.scalars(stored.order_by(StoredCredentials.account_id))).all()
