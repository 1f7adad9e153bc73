"""`berth up` takes no accounts that trade for real: its Temporal has no login."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from infra.database.accounts import LiveAccountRefused, put_account
from infra.database.engine import Database
from infra.database.models import EncryptedCredentials
from infra.local.stack import LocalStack

SHIOAJI = {"broker": "shioaji", "api_key": "key", "secret_key": "secret", "person_id": "A123456789"}


@pytest.mark.timeout(120)
def test_accounts_that_trade_for_real_are_refused_and_looked_for_at_the_start(folder: Path) -> None:
    with LocalStack(folder, pool_target=0, api_processes=1) as stack:
        headers = {"X-API-Key": stack.admin_key}
        with httpx.Client(base_url=f"{stack.api_url}/v1", headers=headers, trust_env=False) as api:
            assert api.post("/users", json={"user_id": "alice"}).is_success
            path = "/users/alice/accounts/{}/credentials"
            live = api.put(path.format("live"), json={**SHIOAJI, "simulation": False})
            assert (live.status_code, live.json()["code"]) == (403, "LIVE_ACCOUNT_REFUSED")
            assert api.put(
                path.format("simulated"), json={**SHIOAJI, "simulation": True}
            ).is_success
        asyncio.run(_store_live(stack))  # as an earlier release, or another setting, let it in
    with pytest.raises(LiveAccountRefused, match=r"1 accounts .*alice/live"):
        LocalStack(folder, pool_target=0, api_processes=1).start()
    with LocalStack(folder, pool_target=0, api_processes=1, live_accounts=True):
        pass


async def _store_live(stack: LocalStack) -> None:
    sealed = EncryptedCredentials(b"", b"", b"", "")
    async with (
        Database(stack.settings.database_url, pool_size=1) as database,
        database.session() as session,
    ):
        await put_account(
            session,
            user_id="alice",
            account_id="live",
            broker="shioaji",
            broker_type="stock",
            simulation=False,
            encrypted=sealed,
        )
