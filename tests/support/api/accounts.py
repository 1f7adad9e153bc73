"""Contains accounts of API tests, their limits and their switches."""

from __future__ import annotations

from typing import Any

from infra.database.trading import limits as trading_limits
from infra.database.trading.models import AccountLimits
from tests.support.systems.api import ServedApi


async def put_account(api: ServedApi, account_id: str, broker: str, broker_type: str) -> None:
    body = {
        "broker": broker,
        "broker_type": broker_type,
        "api_key": "canary",
        "secret_key": "canary",
    }
    async with api.client(api.key) as user:
        path = f"/users/{api.user}/accounts/{account_id}/credentials"
        answer = await user.put(path, json=body | {"person_id": "A123456789"})
        assert answer.status_code == 200, answer.text


async def set_account_limits(api: ServedApi, account_id: str = "main", **limits: Any) -> None:
    async with api.services.database.session() as session:
        await trading_limits.put_limits(
            session, api.user, account_id, AccountLimits(**limits), actor="key:1"
        )


def switch_body(scope: str = "user", state: str = "halted", **fields: Any) -> dict[str, Any]:
    return {"scope": scope, "state": state, "reason": "a test", **fields}
