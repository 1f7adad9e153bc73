"""New credentials for a running worker: by REST, by a plain signal of Temporal's own CLI, and wrong
ones."""

from __future__ import annotations

import asyncio
import subprocess

import pytest
from sqlalchemy import select

from infra.database.accounts import retry_login
from infra.database.engine import Database
from infra.database.models import AuditEntry
from infra.local.servers import TemporalServer
from tests.support.systems.local import RunningSystem, Trader, until
from workflows.names import user_worker_id


def _at_the_exchange(system: RunningSystem, trader: Trader, key: str) -> None:
    system.exchange(lambda admin: admin.register(trader.account_id, key, key, trader.user_id))


def _store(system: RunningSystem, trader: Trader, key: str) -> None:
    """Stores credentials, which tells the running worker, too."""
    stored = system.call(
        "PUT",
        f"/v1/users/{trader.user_id}/accounts/{trader.account_id}/credentials",
        trader.api_key,
        json={"broker": "paper", "api_key": key, "secret_key": key},
    )
    assert stored.is_success, stored.text
    assert stored.json()["reload_signalled"]


def _audited(system: RunningSystem, trader: Trader, action: str) -> list[AuditEntry]:
    """What the audit trail has of this user, oldest first."""

    async def read() -> list[AuditEntry]:
        database = Database(system.stack.settings.database_url, pool_size=1)
        async with database.session() as session:
            rows = await session.scalars(
                select(AuditEntry)
                .where(
                    AuditEntry.subject.contains(trader.user_id),
                    AuditEntry.action.startswith(action),
                )
                .order_by(AuditEntry.id)
            )
            entries = list(rows)
        await database.close()
        return entries

    return asyncio.run(read())


def _signal(system: RunningSystem, workflow_id: str) -> subprocess.CompletedProcess[str]:
    """`temporal workflow signal`, without a payload, as an operator types it."""
    return subprocess.run(
        [
            TemporalServer.binary(),
            "workflow",
            "signal",
            "--address",
            system.stack.temporal.address,
            "--workflow-id",
            workflow_id,
            "--name",
            "reload_credentials",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def _forget_rejection(system: RunningSystem, trader: Trader) -> None:
    """A retry of which the worker does not hear."""

    async def write() -> None:
        database = Database(system.stack.settings.database_url, pool_size=1)
        async with database.session() as session:
            await retry_login(session, trader.user_id, trader.account_id, actor="test")
        await database.close()

    asyncio.run(write())


@pytest.mark.parametrize("way", ["rest", "temporal"])
def test_credentials_that_were_wrong_are_taken_when_somebody_asks_for_a_retry(
    system: RunningSystem, way: str
) -> None:
    """The stored ones are not valid yet, so the old session stays; a retry takes them when they
    are."""
    trader = system.trader()
    worker = system.start_until_active(trader)
    [old] = system.open_sessions(trader)
    _store(system, trader, "new")
    [failed] = until(
        lambda: _audited(system, trader, "credentials.reload") or None, "audited failure"
    )
    assert "LOGIN_REJECTED" in str(failed.data)
    assert "new" not in failed.data.values()
    # The old session stays up, and trades.
    assert system.order(trader).status_code == 201
    assert [session.session_id for session in system.open_sessions(trader)] == [old.session_id]

    _at_the_exchange(system, trader, "new")
    if way == "rest":
        path = f"/v1/users/{trader.user_id}/accounts/{trader.account_id}/retry"
        assert system.call("POST", path, trader.api_key).status_code == 200
    else:
        _forget_rejection(system, trader)
        done = _signal(system, user_worker_id(trader.user_id))
        assert done.returncode == 0, done.stderr

    def renewed() -> bool:
        sessions = system.open_sessions(trader)
        return len(sessions) == 1 and sessions[0].session_id != old.session_id

    until(renewed, "session with the new credentials, and no other")
    assert system.order(trader).status_code == 201
    assert system.start_until_active(trader)["worker_id"] == worker["worker_id"]
    audited = until(
        lambda: rows if len(rows := _audited(system, trader, "credentials.reload")) == 2 else None,
        "audited success",
    )
    assert "LOGIN_REJECTED" not in str(audited[-1].data)


def test_a_signal_for_a_user_without_a_worker_is_refused_with_a_clear_error(
    system: RunningSystem,
) -> None:
    refused = _signal(system, user_worker_id("nobody-42"))
    assert refused.returncode != 0
    assert "not found" in refused.stderr.lower()
    trader = system.trader()
    answer = system.call(
        "POST", f"/v1/users/{trader.user_id}/worker/reload-credentials", trader.api_key
    )
    assert answer.status_code == 404
    assert answer.json()["code"] == "NO_WORKER"
