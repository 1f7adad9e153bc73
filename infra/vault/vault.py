"""Encryption of credentials at rest: AES-256-GCM under a data key, which the master key wraps.

Credentials get a fresh data key and nonce each time they are stored. User and account are bound
twice: as associated data of the ciphertext, and as the context of the wrapped key.
"""

import os
from dataclasses import replace

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from infra.database import accounts
from infra.database.engine import Database
from infra.database.models import EncryptedCredentials
from infra.vault.key_pairs import KeyUnwrapper, KeyWrapper
from worker_runtime.protocol.authentication import join_parts
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Credentials

_NONCE_BYTES = 12


class DecryptFailed(BerthError, code="DECRYPT_FAILED"):
    """Stored credentials cannot be decrypted: altered, or taken from another user or account."""


def _binding(user_id: str, account_id: str) -> bytes:
    return join_parts((b"berth/vault/1", user_id.encode(), account_id.encode()))


async def encrypt_credentials(
    credentials: Credentials, wrapper: KeyWrapper, *, user_id: str, account_id: str
) -> EncryptedCredentials:
    """Encrypts credentials for storage, with the half of the master key that cannot decrypt."""
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
    except (InvalidTag, ValueError):
        # msgspec's errors are ValueErrors; none may show the plaintext.
        raise DecryptFailed from None


async def rewrap_data_key(
    encrypted: EncryptedCredentials,
    unwrapper: KeyUnwrapper,
    wrapper: KeyWrapper,
    *,
    user_id: str,
    account_id: str,
) -> EncryptedCredentials:
    """Wraps the data key with another master key; the ciphertext stays."""
    binding = _binding(user_id, account_id)
    data_key = await unwrapper.unwrap(encrypted.wrapped_key, binding, encrypted.master_key_id)
    return replace(
        encrypted, wrapped_key=await wrapper.wrap(data_key, binding), master_key_id=wrapper.key_id
    )


async def count_under_other_keys(database: Database, key_id: str) -> int:
    """Counts the stored credentials that another master key than `key_id` wraps."""
    return await database.fetch(accounts.count_credentials_under_other_keys, key_id)


async def rewrap_all_data_keys(
    database: Database, unwrapper: KeyUnwrapper, wrapper: KeyWrapper
) -> int:
    """Rewraps all data keys that another master key wraps, one row per transaction; returns how
    many.

    Safe to stop and to run again while API processes store new credentials.
    """
    count = 0
    while True:
        async with database.session() as session:
            row = await accounts.lock_credentials_under_other_key(session, wrapper.key_id)
            if row is None:
                return count
            row.encrypted = await rewrap_data_key(
                row.encrypted, unwrapper, wrapper, user_id=row.user_id, account_id=row.account_id
            )
            count += 1
