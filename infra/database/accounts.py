"""Broker accounts and their encrypted credentials."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Select, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import BrokerAccount, StoredCredentials


@dataclass(frozen=True, kw_only=True)
class EncryptedCredentials:
    """Credentials as they are stored: AES-256-GCM under a data key, which the master key wraps."""

    ciphertext: bytes
    nonce: bytes
    wrapped_key: bytes
    master_key_id: str


@dataclass(frozen=True, kw_only=True)
class EncryptedAccount:
    user_id: str
    account_id: str
    broker: str
    broker_type: str
    simulation: bool
    version: int
    encrypted: EncryptedCredentials


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
    account = insert(BrokerAccount).values(
        user_id=user_id, account_id=account_id, broker=broker, broker_type=broker_type, simulation=simulation
    )
    await session.execute(
        account.on_conflict_do_update(
            index_elements=["user_id", "account_id"],
            set_={"broker": broker, "broker_type": broker_type, "simulation": simulation},
        )
    )
    values = {
        "ciphertext": encrypted.ciphertext,
        "nonce": encrypted.nonce,
        "wrapped_key": encrypted.wrapped_key,
        "master_key_id": encrypted.master_key_id,
    }
    stored = insert(StoredCredentials).values(user_id=user_id, account_id=account_id, version=1, **values)
    version = await session.scalar(
        stored.on_conflict_do_update(
            index_elements=["user_id", "account_id"],
            set_={**values, "version": StoredCredentials.version + 1, "updated_at": func.now()},
        ).returning(StoredCredentials.version)
    )
    return int(version or 0)


async def account_exists(session: AsyncSession, user_id: str, account_id: str) -> bool:
    """Whether the user has this account, with or without credentials."""
    return await session.get(BrokerAccount, (user_id, account_id)) is not None


def select_accounts(user_id: str) -> Select[BrokerAccount, StoredCredentials]:
    """Selects the rows of all accounts of a user that have credentials, by account id."""
    return (
        select(BrokerAccount, StoredCredentials)
        .join(
            StoredCredentials,
            (StoredCredentials.user_id == BrokerAccount.user_id)
            & (StoredCredentials.account_id == BrokerAccount.account_id),
        )
        .where(BrokerAccount.user_id == user_id)
        .order_by(BrokerAccount.account_id)
    )


def account_from_rows(account: BrokerAccount, stored: StoredCredentials) -> EncryptedAccount:
    """The account that the two rows describe."""
    return EncryptedAccount(
        user_id=account.user_id,
        account_id=account.account_id,
        broker=account.broker,
        broker_type=account.broker_type,
        simulation=account.simulation,
        version=stored.version,
        encrypted=EncryptedCredentials(
            ciphertext=stored.ciphertext,
            nonce=stored.nonce,
            wrapped_key=stored.wrapped_key,
            master_key_id=stored.master_key_id,
        ),
    )


async def accounts_of_user(session: AsyncSession, user_id: str) -> list[EncryptedAccount]:
    """All accounts of a user that have credentials, by account id."""
    rows = await session.execute(select_accounts(user_id))
    return [account_from_rows(account, stored) for account, stored in rows]
