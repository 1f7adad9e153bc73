"""Credentials at rest: AES-256-GCM under a data key of their own, wrapped by the master key (V1).

Each time credentials are stored they get a fresh data key and nonce. User and account are bound twice:
as associated data of the ciphertext, and as the context of the wrapped key.
"""

from __future__ import annotations

import os

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import func, select, update

from infra.database.accounts import EncryptedCredentials
from infra.database.engine import Database
from infra.database.models import StoredCredentials
from infra.vault.key_pairs import KeyUnwrapper, KeyWrapper
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Credentials

_NONCE_BYTES = 12


class DecryptFailed(BerthError):
    """Stored credentials cannot be decrypted: altered, or taken from another user or account."""

    code = "DECRYPT_FAILED"


def _binding(user_id: str, account_id: str) -> bytes:
    parts = (b"berth/vault/1", user_id.encode(), account_id.encode())
    # Length prefixes: no two different pairs give the same bytes.
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


async def encrypt_credentials(
    credentials: Credentials, wrapper: KeyWrapper, *, user_id: str, account_id: str
) -> EncryptedCredentials:
    """What the API stores. Needs only the half of the master key that cannot decrypt."""
    binding = _binding(user_id, account_id)
    data_key = AESGCM.generate_key(256)
    nonce = os.urandom(_NONCE_BYTES)
    return EncryptedCredentials(
        ciphertext=AESGCM(data_key).encrypt(nonce, msgspec.json.encode(credentials), binding),
        nonce=nonce,
        wrapped_key=await wrapper.wrap(data_key, binding),
        master_key_id=wrapper.key_id,
    )


async def decrypt_credentials(
    encrypted: EncryptedCredentials, unwrapper: KeyUnwrapper, *, user_id: str, account_id: str
) -> Credentials:
    """Raises `DecryptFailed`, or what `KeyUnwrapper.unwrap` raises."""
    binding = _binding(user_id, account_id)
    data_key = await unwrapper.unwrap(encrypted.wrapped_key, binding, encrypted.master_key_id)
    try:
        plain = AESGCM(data_key).decrypt(encrypted.nonce, encrypted.ciphertext, binding)
        return msgspec.json.decode(plain, type=Credentials)
    except (InvalidTag, ValueError):  # msgspec's errors are ValueErrors; none may show the plaintext
        raise DecryptFailed from None


async def rewrap_data_key(
    encrypted: EncryptedCredentials,
    unwrapper: KeyUnwrapper,
    wrapper: KeyWrapper,
    *,
    user_id: str,
    account_id: str,
) -> EncryptedCredentials:
    """The same ciphertext, its data key wrapped by another master key."""
    binding = _binding(user_id, account_id)
    data_key = await unwrapper.unwrap(encrypted.wrapped_key, binding, encrypted.master_key_id)
    return EncryptedCredentials(
        ciphertext=encrypted.ciphertext,
        nonce=encrypted.nonce,
        wrapped_key=await wrapper.wrap(data_key, binding),
        master_key_id=wrapper.key_id,
    )


async def count_under_other_keys(database: Database, key_id: str) -> int:
    """How many stored credentials another master key than `key_id` wraps."""
    async with database.session() as session:
        count = await session.scalar(
            select(func.count())
            .select_from(StoredCredentials)
            .where(StoredCredentials.master_key_id != key_id)
        )
    return int(count or 0)


async def rewrap_all_data_keys(database: Database, unwrapper: KeyUnwrapper, wrapper: KeyWrapper) -> int:
    """Rotates the master key: rewraps what another one wrapped, a row a transaction; returns how many.

    Safe to stop and to run again, and beside API processes that store new credentials meanwhile.
    """
    count = 0
    while True:
        async with database.session() as session:
            row = await session.scalar(
                select(StoredCredentials)
                .where(StoredCredentials.master_key_id != wrapper.key_id)
                .limit(1)
                .with_for_update(skip_locked=True)
            )
            if row is None:
                return count
            old = EncryptedCredentials(
                ciphertext=row.ciphertext,
                nonce=row.nonce,
                wrapped_key=row.wrapped_key,
                master_key_id=row.master_key_id,
            )
            new = await rewrap_data_key(
                old, unwrapper, wrapper, user_id=row.user_id, account_id=row.account_id
            )
            await session.execute(
                update(StoredCredentials)
                .where(
                    StoredCredentials.user_id == row.user_id,
                    StoredCredentials.account_id == row.account_id,
                )
                .values(wrapped_key=new.wrapped_key, master_key_id=new.master_key_id)
            )
            count += 1
