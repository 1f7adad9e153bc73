"""Where a user's daily statements go: set by operators, seen by the user."""

from __future__ import annotations

import httpx
from sqlalchemy import select

from infra.database.models import AuditEntry
from tests.support.systems.api import ServedApi


async def test_operators_set_the_addresses_and_the_user_sees_them(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    path = f"/users/{api.user}/statement-addresses"
    none = {"email": None, "webhook_url": None}
    both = {"email": "alice@example.com", "webhook_url": "https://alice.example.com/hook"}
    assert (await user.get(path)).json() == none
    assert (await user.put(path, json=both)).json()["code"] == "FORBIDDEN"
    async with api.client(api.admin_key) as admin:
        assert (await admin.put(path, json=both)).json() == both
        assert (await user.get(path)).json() == both
        only = {"email": "other@example.com"}
        assert (await admin.put(path, json=only)).json() == none | only
        assert (await user.get(path)).json() == none | only
        missing = await admin.put("/users/nobody-there/statement-addresses", json=both)
        assert (missing.status_code, missing.json()["code"]) == (404, "USER_NOT_FOUND")
    assert (await user.get("/users/somebody/statement-addresses")).status_code == 404
    async with api.services.database.session() as session:
        statement = select(AuditEntry.data).where(
            AuditEntry.action == "statements.set", AuditEntry.subject == f"user:{api.user}"
        )
        assert (await session.scalars(statement.order_by(AuditEntry.id))).all() == [
            both,
            none | only,
        ]


async def test_an_address_that_nothing_can_be_sent_to_is_refused(api: ServedApi) -> None:
    path = f"/users/{api.user}/statement-addresses"
    async with api.client(api.admin_key) as admin:
        for wrong in (
            {"email": "nobody"},
            {"email": "a@b\nc"},
            {"webhook_url": "ftp://example.com"},
            {"webhook_url": "https:///hook"},
            {"webhook_url": "https://[bad/"},
            {"other": "x"},
        ):
            answer = await admin.put(path, json=wrong)
            assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST"), wrong
