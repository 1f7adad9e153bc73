"""Somebody ends what lives long in Temporal, by its own command. It is back soon, with the same
workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.exchange.behaviour import Behaviour, FaultPoint
from tests.support.systems.local import POOL, RunningSystem, Trader, until
from workflows import names

#: Seconds: two looks of the restorer and its confirmation, on a busy machine.
BACK = 60.0


def temporal(system: RunningSystem, *words: str) -> str:
    """Runs the `temporal` command."""
    command = [str(Path(sys.executable).with_name("temporal")), *words]
    done = subprocess.run(
        [*command, "--address", system.stack.temporal.address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def end(system: RunningSystem, how: str, workflow_id: str) -> None:
    if how == "reset":
        temporal(
            system,
            "workflow",
            "reset",
            "--workflow-id",
            workflow_id,
            "--type",
            "FirstWorkflowTask",
            "--reason",
            "by a test",
        )
    else:
        sure = ("--yes",) if how == "delete" else ()
        temporal(system, "workflow", how, "--workflow-id", workflow_id, *sure)


def pool_view(system: RunningSystem) -> dict[str, Any] | None:
    answer = system.call("GET", "/v1/pools/default", system.stack.admin_key)
    if answer.status_code == 200:
        view: dict[str, Any] = answer.json()
        return view
    assert answer.status_code == 503, answer.text
    return None


@pytest.mark.parametrize("how", ["terminate", "cancel", "delete", "reset"])
def test_the_pool_is_back_with_the_size_that_operators_had_set(
    system: RunningSystem, how: str
) -> None:
    before = pool_view(system)
    assert before is not None
    body = {**before["policy"], "target": POOL + 1, "revision": before["revision"]}
    changed = system.call("PUT", "/v1/pools/default", system.stack.admin_key, json=body)
    assert changed.status_code == 200, changed.text
    system.stack.wait_pool(POOL + 1)
    free = system.stack.ready_workers()
    end(system, how, names.worker_pool_id("default"))

    def back() -> dict[str, Any] | None:
        view = pool_view(system)
        return view if view and view["ready"] == POOL + 1 else None

    view = until(back, "pool", BACK)
    assert view["policy"]["target"] == POOL + 1
    assert free <= system.stack.ready_workers()
    if how != "reset":

        def reports_the_rebuild() -> bool:
            """The report is as old as the restorer's last look: the pool answers before it is up
            there."""
            servers = system.call("GET", "/v1/fleet/servers", system.stack.admin_key).json()[
                "servers"
            ]
            pool = servers["pool default"]
            return bool(pool["state"] == "up" and pool["reason"].startswith("rebuilt"))

        until(reports_the_rebuild, "report of the rebuild", BACK)
    body = {**view["policy"], "target": POOL, "revision": view["revision"]}
    assert (
        system.call("PUT", "/v1/pools/default", system.stack.admin_key, json=body).status_code
        == 200
    )


def worker_of(system: RunningSystem, trader: Trader) -> dict[str, Any] | None:
    """The lifecycle of an Active worker, as its workflow tells it."""
    answer = system.call("GET", f"/v1/users/{trader.user_id}/worker", trader.api_key)
    if answer.status_code != 200:
        return None
    life: dict[str, Any] | None = answer.json()["lifecycle"]
    return life if life and life["state"] == "Active" else None


@pytest.mark.parametrize("how", ["terminate", "delete", "reset"])
def test_a_user_with_an_order_in_flight_keeps_the_worker(system: RunningSystem, how: str) -> None:
    trader = system.trader()
    system.start_until_active(trader)
    before = until(lambda: worker_of(system, trader), "active worker")
    pid = system.worker_pid(before["worker_id"])
    slow = Behaviour(latency_ms=3000)
    system.exchange(lambda admin: admin.set_behaviour(trader.account_id, slow))
    answer = system.threads.submit(system.order, trader)
    until(lambda: system.ledger(trader), "order at the exchange")
    end(system, how, names.user_worker_id(trader.user_id))
    placed = answer.result(60)
    assert placed.status_code in (201, 202), placed.text
    after = until(lambda: worker_of(system, trader), "adopted worker", BACK)
    assert after["worker_id"] == before["worker_id"]
    assert system.worker_pid(after["worker_id"]) == pid
    system.exchange(lambda admin: admin.set_behaviour(trader.account_id, Behaviour()))

    def final() -> bool:
        path = f"/v1/orders/{placed.json()['id']}"
        return bool(system.call("GET", path, trader.api_key).json()["state"] == "filled")

    until(final, "final order", BACK)
    second = system.order(trader)
    assert second.status_code == 201, second.text
    assert [order.client_note for order in system.ledger(trader)] == [
        placed.json()["id"],
        second.json()["id"],
    ]
    assert len(system.sessions(trader)) == 1  # it never logged in anew


def open_run(system: RunningSystem, workflow_id: str) -> str | None:
    """The id of a workflow's run that is under way."""
    query = f"WorkflowId = '{workflow_id}' AND ExecutionStatus = 'Running'"
    listed = json.loads(temporal(system, "workflow", "list", "--query", query, "--output", "json"))
    run_id: str | None = listed[0]["execution"]["runId"] if listed else None
    return run_id


@pytest.mark.parametrize("how", ["terminate", "cancel", "delete", "reset"])
def test_an_order_whose_workflow_was_ended_is_followed_again(
    system: RunningSystem, how: str
) -> None:
    trader = system.trader()
    system.start_until_active(trader)
    # Nothing tells of the order while the broker's list is a minute behind.
    faults = {FaultPoint.LOST_ACK: 1, FaultPoint.LOST_EVENT: 1}
    silent = Behaviour(faults=faults, listing_lag_ms=60_000)
    system.exchange(lambda admin: admin.set_behaviour(trader.account_id, silent))
    order_id = system.order(trader).json()["id"]

    def state() -> str:
        return str(system.call("GET", f"/v1/orders/{order_id}", trader.api_key).json()["state"])

    until(lambda: state() == "unknown", "unknown order")
    followed = names.order_id(order_id)
    first = until(lambda: open_run(system, followed), "run that follows the order", BACK)
    end(system, how, followed)
    # The sweeper itself would look only after five minutes.
    until(lambda: open_run(system, followed) not in (None, first), "another run", BACK)
    assert state() == "unknown"
    system.exchange(lambda admin: admin.set_behaviour(trader.account_id, Behaviour()))
    until(lambda: state() == "filled", "final order", BACK)
    assert len(system.ledger(trader)) == 1


def test_a_cancelled_workflow_ends_its_worker_in_order(system: RunningSystem) -> None:
    trader = system.trader()
    system.start_until_active(trader)
    end(system, "cancel", names.user_worker_id(trader.user_id))
    until(lambda: not system.open_sessions(trader), "logout", BACK)
    assert system.order(trader).status_code == 201


def test_a_deleted_schedule_is_made_anew_and_a_paused_one_stays_paused(
    system: RunningSystem,
) -> None:
    def shown() -> dict[str, Any]:
        servers = system.call("GET", "/v1/fleet/servers", system.stack.admin_key).json()["servers"]
        server: dict[str, Any] = servers["schedule maintenance"]
        return server

    schedule = "--schedule-id", names.MAINTENANCE_SCHEDULE
    temporal(system, "schedule", "delete", *schedule)
    until(lambda: shown()["reason"].startswith("rebuilt"), "schedule", BACK)
    temporal(system, "schedule", "toggle", *schedule, "--pause", "--reason", "an operator's wish")
    try:
        metrics = until(
            lambda: _metric(system, 'berth_entities{kind="schedule",state="paused"} 1'),
            "metric",
            BACK,
        )
        assert metrics
        assert shown() | {"seen_at": None} == {
            "state": "paused",
            "ms": None,
            "reason": "an operator's wish",
            "seen_at": None,
        }
    finally:
        temporal(system, "schedule", "toggle", *schedule, "--unpause", "--reason", "test")
    until(lambda: shown()["state"] == "up", "schedule", BACK)


def _metric(system: RunningSystem, line: str) -> bool:
    text = system.call("GET", "/v1/metrics", system.stack.admin_key).text
    name, _, _ = line.partition("{")
    return any(
        metric_line.startswith(name)
        and 'state="paused"' in metric_line
        and 'kind="schedule"' in metric_line
        for metric_line in text.splitlines()
    )
