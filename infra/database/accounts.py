"""Broker accounts and their encrypted credentials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import BrokerAccount, EncryptedCredentials, StoredCredentials, upsert
from worker_runtime.protocol.errors import UnknownAccount


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
    key = {"user_id": user_id, "account_id": account_id}
    await session.execute(upsert(BrokerAccount, key, shown))
    grown = {"version": StoredCredentials.version + 1, "updated_at": func.now()}
    stored = upsert(StoredCredentials, key, {"version": 1, **asdict(encrypted)}, **grown)
    version = await session.scalar(stored.returning(StoredCredentials.version))
    return int(version or 0)


async def require_account(session: AsyncSession, user_id: str, account_id: str) -> None:
    """Raises `UnknownAccount` if the user does not have this account, with or without credentials."""
    if await session.get(BrokerAccount, (user_id, account_id)) is None:
        raise UnknownAccount(f"user {user_id} has no account {account_id}")


async def accounts_of_user(session: AsyncSession, user_id: str) -> Sequence[StoredCredentials]:
    """Returns the credentials of all accounts of a user, by account id."""
    stored = select(StoredCredentials).where(StoredCredentials.user_id == user_id)
    return (await session.scalars(stored.order_by(StoredCredentials.account_id))).all()
