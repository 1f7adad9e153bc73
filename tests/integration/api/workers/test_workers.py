"""Workers are started, stopped and shown through their workflow."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from sqlalchemy import select, text

from infra.database.models import AuditEntry
from tests.support.systems.api import ServedApi, StartWorker, an_order
from tests.support.waiting import until
from tests.support.workflows.user_worker_stub import LifecycleStub
from worker_runtime.protocol import keys
from workflows.user_worker.messages import ReloadResult


async def test_two_orders_without_a_worker_call_ensure_active_once(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    lifecycle.go.clear()
    async with api.client(api.key) as user:
        path = f"/users/{api.user}/orders?wait=30"
        both = asyncio.gather(*(user.post(path, json=an_order(n)) for n in (1, 2)))
        await until(lambda: api.services.answers.pending == 2 and len(lifecycle.calls) == 1)
        lifecycle.go.set()
        answers = await both
    assert [answer.status_code for answer in answers] == [201, 201]
    assert len(lifecycle.calls) == 1
    assert lifecycle.calls[0].mark_missing
    (worker,) = lifecycle.workers
    tags = [int(order.tag, 36) for order in worker.popped]
    assert len(tags) == 2
    assert tags == sorted(tags)


async def test_a_worker_that_cannot_be_started_gives_the_order_back(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    lifecycle.failures = ["LOGIN_REJECTED"]
    async with api.client(api.key) as user:
        answer = await user.post(f"/users/{api.user}/orders?wait=30", json=an_order())
        body = answer.json()
        assert (answer.status_code, body["code"]) == (422, "LOGIN_REJECTED")
        assert body["order"]["state"] == "rejected"
        assert await api.services.valkey.llen(keys.requests(api.user)) == 0

        # The first outcome stays, also now that a worker would come; and in the database, for good.
        again = await user.post(f"/users/{api.user}/orders", json=an_order())
        assert (again.status_code, again.json()["code"]) == (422, "LOGIN_REJECTED")
        await api.services.valkey.delete(keys.response(api.user, body["order"]["id"]))
        seen = (await user.get(f"/orders/{body['order']['id']}")).json()
        assert (seen["state"], seen["code"], seen["final"]) == ("rejected", "LOGIN_REJECTED", True)
        assert len(lifecycle.calls) == 1

        other = await user.post(f"/users/{api.user}/orders?wait=30", json=an_order(2))
        assert other.status_code == 201
    (worker,) = lifecycle.workers
    assert [order.order_id for order in worker.popped] == [other.json()["id"]]


async def test_a_failed_start_after_a_202_is_seen_later(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    lifecycle.failures = ["UNKNOWN_ACCOUNT"]
    lifecycle.go.clear()
    async with api.client(api.key) as user:
        answer = await user.post(f"/users/{api.user}/orders?wait=0.05", json=an_order())
        assert answer.status_code == 202
        lifecycle.go.set()
        await until(lambda: api.services.answers.pending == 0)
        seen = (await user.get(answer.headers["location"].removeprefix("/v1"))).json()
    assert (seen["state"], seen["code"]) == ("rejected", "UNKNOWN_ACCOUNT")


async def test_draining_is_waited_out(whole_api: ServedApi, lifecycle: LifecycleStub) -> None:
    api = whole_api
    lifecycle.failures = ["DRAINING", "DRAINING"]
    async with api.client(api.key) as user:
        answer = await user.post(f"/users/{api.user}/orders?wait=30", json=an_order())
    assert answer.status_code == 201, answer.text
    assert len(lifecycle.calls) == 3


async def test_a_run_that_closes_under_the_update_is_followed_by_a_new_one(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    lifecycle.failures = ["CLOSES"]
    async with api.client(api.key) as user:
        starting = asyncio.create_task(user.post(f"/users/{api.user}/worker/start"))
        await until(lambda: len(lifecycle.calls) == 1 and not lifecycle.failures)
        # Its handler never ends, so the run is ended from outside: as a reset or a timeout would.
        handle = api.services.control.client.get_workflow_handle(f"user-worker-{api.user}")
        await handle.terminate()
        answer = await starting
    assert answer.status_code == 200, answer.text
    assert len(lifecycle.calls) == 2


async def test_a_dead_worker_is_noticed_while_an_order_waits(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    await api.services.valkey.set(keys.mark(api.user), "1:dead", px=300)
    async with api.client(api.key) as user:
        answer = await user.post(f"/users/{api.user}/orders?wait=30", json=an_order())
    assert answer.status_code == 201
    assert len(lifecycle.calls) == 1


async def test_start_returns_the_active_worker(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    async with api.client(api.key) as user:
        answer = await user.post(f"/users/{api.user}/worker/start")
        body = answer.json()
        assert (answer.status_code, body["worker_id"], body["epoch"]) == (200, "scripted", 1)
        assert body["claimed_at"] == "2023-11-14T22:13:20Z"
        shown = (await user.get(f"/users/{api.user}/worker")).json()
        lifecycle.health = "well"  # of a session that continues with the former credentials
        after = (await user.get(f"/users/{api.user}/worker")).json()["lifecycle"]
    assert after["health"] == "degraded: credentials refused: LOGIN_REJECTED: wrong key"
    assert (shown["live"], shown["state"]) == (True, "Active")
    assert shown["mark"] == {"worker_id": "scripted", "epoch": 1}
    assert shown["metadata"]["version"] == "0"
    lifecycle_of = shown["lifecycle"]
    assert lifecycle_of["state"] == "Active"
    health = "degraded: broker unreachable; credentials refused: LOGIN_REJECTED: wrong key"
    assert (lifecycle_of["health"], lifecycle_of["crashes"]) == (health, 2)
    assert lifecycle_of["health_at"] == "2023-11-14T22:14:20Z"
    assert lifecycle_of["last_activity"] == "2023-11-14T22:14:50Z"  # as the worker says


async def test_a_start_is_in_the_audit_trail_before_it_begins(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    async with api.client(api.key) as user:
        # The key is remembered.
        assert (await user.get(f"/users/{api.user}/orders")).status_code == 200
        async with api.services.database.session() as session:
            await session.execute(text("lock table audit_trail in access exclusive mode"))
            starting = asyncio.create_task(user.post(f"/users/{api.user}/worker/start"))
            waiting = text(
                "select count(*) from pg_locks where relation = 'audit_trail'::regclass and "
                "not granted"
            )
            async with asyncio.timeout(10):
                while not await session.scalar(waiting):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert not api.services.starter._running.keys
            assert not lifecycle.calls
        assert (await starting).status_code == 200
    assert len(lifecycle.calls) == 1


async def test_a_start_that_takes_longer_than_its_wait_continues(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    lifecycle.go.clear()
    async with api.client(api.key) as user:
        answer = await user.post(f"/users/{api.user}/worker/start?wait=0.05")
        assert (answer.status_code, answer.headers["location"]) == (
            202,
            f"/v1/users/{api.user}/worker",
        )
        lifecycle.go.set()
        await until(lambda: len(lifecycle.workers) == 1)


@pytest.mark.parametrize(("code", "status"), [("LOGIN_REJECTED", 422), ("LOGIN_LIMITED", 429)])
async def test_start_fails_with_the_workflows_reason(
    whole_api: ServedApi, lifecycle: LifecycleStub, code: str, status: int
) -> None:
    lifecycle.failures = [code]
    async with whole_api.client(whole_api.key) as user:
        answer = await user.post(f"/users/{whole_api.user}/worker/start")
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.json()["detail"] == f"scripted {code}"


async def test_a_reason_that_only_the_orchestrator_knows_means_that_no_worker_came(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    lifecycle.failures = ["LAUNCHER_BUSY"]
    async with whole_api.client(whole_api.key) as user:
        answer = await user.post(f"/users/{whole_api.user}/worker/start")
    assert (answer.status_code, answer.json()["code"]) == (503, "WORKER_UNAVAILABLE")
    assert "LAUNCHER_BUSY" in answer.json()["detail"]


async def test_stop_and_reload_are_signals(whole_api: ServedApi, lifecycle: LifecycleStub) -> None:
    api = whole_api
    async with api.client(api.key) as user:
        for path in ("stop", "reload-credentials"):
            none = await user.post(f"/users/{api.user}/worker/{path}")
            assert (none.status_code, none.json()["code"]) == (404, "NO_WORKER")
        assert (await user.get(f"/users/{api.user}/worker")).json() == {
            "user_id": api.user,
            "live": False,
            "state": None,
            "mark": None,
            "metadata": {},
            "lifecycle": None,
        }
        await user.post(f"/users/{api.user}/worker/start")
        reload = await user.post(f"/users/{api.user}/worker/reload-credentials")
        assert (reload.status_code, reload.json()["signal"]) == (202, "reload_credentials")
        stop = await user.post(f"/users/{api.user}/worker/stop", json={"reason": "going home"})
        assert (stop.status_code, stop.json()["signal"]) == (202, "shutdown")
        await until(lambda: len(lifecycle.signals) == 2)
    assert lifecycle.signals == [("reload_credentials", ""), ("shutdown", "going home")]


async def test_acts_on_a_worker_are_noted_only_where_there_is_one(whole_api: ServedApi) -> None:
    """A key that stops a worker again and again, where there is none, fills no audit trail."""
    api, acts = whole_api, ("reload-credentials", "resume", "stop")

    async def noted(admin: httpx.AsyncClient) -> list[str]:
        answer = await admin.get(
            "/audit", params={"subject": f"user:{api.user}", "action": "worker."}
        )
        return [entry["action"] for entry in answer.json()["entries"]]

    async with api.client(api.admin_key) as admin:
        for act in acts:
            none = await admin.post(f"/users/{api.user}/worker/{act}")
            assert (none.status_code, none.json()["code"]) == (404, "NO_WORKER")
        assert await noted(admin) == []
        await admin.post(f"/users/{api.user}/worker/start")
        for act in acts:
            done = await admin.post(f"/users/{api.user}/worker/{act}", json={"reason": "a test"})
            assert done.status_code == 202, done.text
        names = [f"worker.{act}_requested" for act in ("stop", "resume", "reload", "start")]
        assert await noted(admin) == names


async def test_resume_is_a_signal_for_operators(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    path = f"/users/{api.user}/worker/resume"
    async with api.client(api.key) as user, api.client(api.admin_key) as admin:
        own = await user.post(path)
        assert (own.status_code, own.json()["code"]) == (403, "FORBIDDEN")
        none = await admin.post(path)
        assert (none.status_code, none.json()["code"]) == (404, "NO_WORKER")
        unknown = await admin.post("/users/nobody/worker/resume")
        assert (unknown.status_code, unknown.json()["code"]) == (404, "USER_NOT_FOUND")
        await user.post(f"/users/{api.user}/worker/start")
        done = await admin.post(path)
        assert (done.status_code, done.json()["signal"]) == (202, "resume")
        await until(lambda: lifecycle.signals == [("resume", "")])


async def test_a_reload_that_is_waited_for_says_what_came_of_it(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    path = f"/users/{api.user}/worker/reload-credentials"
    async with api.client(api.key) as user:
        none = await user.post(path, params={"wait": 30})
        assert (none.status_code, none.json()["code"]) == (404, "NO_WORKER")
        await user.post(f"/users/{api.user}/worker/start")

        done = await user.post(path, params={"wait": 30})
        assert (done.status_code, done.json()) == (200, {"user_id": api.user, "detail": "reloaded"})

        lifecycle.reload = ReloadResult(
            ok=False, failure_code="LOGIN_REJECTED", failure_detail="bad key"
        )
        refused = await user.post(path, params={"wait": 30})
        body = refused.json()
        assert (refused.status_code, body["code"], body["retryable"]) == (
            422,
            "LOGIN_REJECTED",
            False,
        )
        assert body["detail"] == "bad key; the worker keeps the session it had"

        lifecycle.reload = ReloadResult(
            ok=False, failure_code="WORKER_UNAVAILABLE", failure_detail="silent"
        )
        silent = await user.post(path, params={"wait": 30})
        assert (silent.status_code, silent.json()["code"]) == (503, "WORKER_UNAVAILABLE")

        lifecycle.reload = None
        slow = await user.post(path, params={"wait": 0.3})
        assert (slow.status_code, slow.json()["signal"]) == (202, "reload_credentials")

        ending = asyncio.create_task(user.post(path, params={"wait": 30}))
        await user.post(f"/users/{api.user}/worker/stop")
        ended = await ending
        assert (ended.status_code, ended.json()["code"]) == (404, "NO_WORKER")
    assert [name for name, _ in lifecycle.signals] == ["shutdown"]


async def test_without_temporal_a_reload_that_is_waited_for_fails_at_once(api: ServedApi) -> None:
    async with api.client(api.key) as user:
        answer = await user.post(
            f"/users/{api.user}/worker/reload-credentials", params={"wait": 30}
        )
    assert (answer.status_code, answer.json()["code"]) == (503, "TEMPORAL_UNAVAILABLE")


async def test_who_asked_for_what_and_why_is_in_the_audit_trail(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    path = f"/users/{api.user}/worker"
    async with api.client(api.key) as user, api.client(api.admin_key) as admin:
        await user.post(f"{path}/start")
        await admin.post(f"{path}/resume", json={"reason": "fixed the broker's address"})
        await admin.post(f"{path}/reload-credentials", json={"reason": "new key"})
        await admin.post(f"{path}/reload-credentials", params={"wait": 30})
        await user.post(f"{path}/stop", json={"reason": "going home"})
        refused = await admin.post(f"{path}/stop", json={"reason": "line\nbreak"})
        assert refused.status_code == 422
    async with api.services.database.session() as session:
        rows = await session.scalars(
            select(AuditEntry)
            .where(AuditEntry.subject == f"user:{api.user}")
            .order_by(AuditEntry.id)
        )
        entries = [
            (row.action, row.data["reason"], row.actor) for row in rows if "reason" in row.data
        ]
    admin_actor, user_actor = entries[1][2], entries[0][2]
    assert entries == [
        ("worker.start_requested", "requested", user_actor),
        ("worker.resume_requested", "fixed the broker's address", admin_actor),
        ("worker.reload_requested", "new key", admin_actor),
        ("worker.reload_requested", "requested", admin_actor),
        ("worker.stop_requested", "going home", user_actor),
    ]
    assert admin_actor != user_actor
    assert admin_actor.startswith("key:")
    assert api.admin_key not in admin_actor


async def test_new_credentials_are_sent_to_a_running_worker(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    async with api.client(api.key) as user:
        await user.post(f"/users/{api.user}/worker/start")
        body = {"broker": "paper", "api_key": "k2", "secret_key": "s2"}
        answer = await user.put(f"/users/{api.user}/accounts/main/credentials", json=body)
        assert (answer.status_code, answer.json()["version"]) == (200, 2)
        assert answer.json()["reload_signalled"] is True
        await until(lambda: lifecycle.signals == [("reload_credentials", "")])


async def test_an_order_of_a_user_with_a_live_worker_calls_no_workflow(
    whole_api: ServedApi, lifecycle: LifecycleStub, start_worker: StartWorker
) -> None:
    api = whole_api
    await start_worker(api.user)
    async with api.client(api.key) as user:
        assert (await user.post(f"/users/{api.user}/orders", json=an_order())).status_code == 201
    assert lifecycle.calls == []


async def test_ready_names_every_server(whole_api: ServedApi) -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(whole_api.app), base_url="http://api/v1"
    ) as anyone:
        assert (await anyone.get("/healthz")).json() == {"status": "ok"}
        # A server counts as down after 1 s without an answer, and a machine may stand still for
        # longer.
        for _ in range(10):
            ready = await anyone.get("/readyz")
            if ready.status_code == 200:
                break
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert {
        name: dependency["state"] for name, dependency in ready.json()["dependencies"].items()
    } == {
        "postgresql": "up",
        "valkey": "up",
        "temporal": "up",
    }
