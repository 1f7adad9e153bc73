"""A user's accounts, sealed to one worker's public key for one claim or reload."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from infra.database.accounts import Account
from infra.vault import vault
from infra.vault.master_key import KeyUnwrapper
from worker_runtime.protocol import sealing
from worker_runtime.protocol.messages import SealedAccount


async def sealed_accounts(
    accounts: Sequence[Account],
    unwrapper: KeyUnwrapper,
    public_key: bytes,
    *,
    epoch: int,
    claim_id: str,
    worker_id: str,
) -> list[SealedAccount]:
    """Decrypts and seals in one breath: the clear text lives only in this call (invariant *sealed*)."""
    sealed = []
    for account in accounts:
        credentials = await vault.decrypt(
            account.encrypted, unwrapper, user_id=account.user_id, account_id=account.account_id
        )
        box = sealing.seal(
            msgspec.json.encode(credentials),
            public_key,
            user_id=account.user_id,
            account_id=account.account_id,
            epoch=epoch,
            claim_id=claim_id,
            worker_id=worker_id,
        )
        sealed.append(
            SealedAccount(
                account_id=account.account_id,
                broker=account.broker,
                broker_type=account.broker_type,
                simulation=account.simulation,
                version=account.version,
                sealed=box,
            )
        )
    return sealed
