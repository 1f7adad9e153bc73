"""At the limit of workers: a typed refusal that says when to come again."""

from __future__ import annotations

from tests.support.systems.api import ServedApi
from tests.support.workflows.user_worker_stub import LifecycleStub


async def test_who_gets_no_worker_is_told_when_to_ask_again(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    lifecycle.failures = ["POOL_EXHAUSTED"]
    async with whole_api.client(whole_api.admin_key) as admin:
        refused = await admin.post(f"/users/{whole_api.user}/worker/start?wait=20")
        assert (refused.status_code, refused.json()["code"]) == (503, "POOL_EXHAUSTED"), (
            refused.text
        )
        assert refused.json()["retryable"] is True
        assert refused.headers["Retry-After"] == "5"
        assert (
            await admin.post(f"/users/{whole_api.user}/worker/start?wait=20")
        ).status_code == 200
