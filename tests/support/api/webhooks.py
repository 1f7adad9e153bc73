"""Contains webhooks of API tests and the signals that are sent to them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import httpx

from tests.support.systems.api import ServedApi


async def create_webhook(api: ServedApi, **body: Any) -> dict[str, Any]:
    async with api.client(api.key) as user:
        answer = await user.post(
            f"/users/{api.user}/webhooks",
            json={"account_id": "main", "quantity_unit": "lots", **body},
        )
    assert answer.status_code == 201, answer.text
    webhook: dict[str, Any] = answer.json()
    return webhook


def make_signal(made: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "secret": made["secret"],
        "time": datetime.now(UTC).isoformat(),
        "action": "buy",
        "symbol": "2330",
        "quantity": "1",
        **changes,
    }


async def post_signal(
    api: ServedApi, made: dict[str, Any], signal: Any, **how: Any
) -> httpx.Response:
    async with api.client(None) as anybody:
        content = signal if isinstance(signal, bytes) else json.dumps(signal).encode()
        return await anybody.post(f"/webhooks/{made['token']}/signals", content=content, **how)


async def await_signal_outcome(
    api: ServedApi, made: dict[str, Any], signal: Any, *, new: bool = True, **how: Any
) -> httpx.Response:
    """Sends the signal until its answer is final, and returns that answer.

    After 2 s, which a busy machine may need, the answer is a 202. With `new`, a later 200 is
    returned as a 201, as if the first answer had been final.
    """
    answer = await post_signal(api, made, signal, **how)
    while answer.status_code == 202:
        answer = await post_signal(api, made, signal, **how)
        if new and answer.status_code == 200:
            answer.status_code = 201
    return answer
