"""Somebody ends what lives long in Temporal, by its own command. It is back soon, with the same
workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.exchange.behaviour import Behaviour
from tests.support.systems.local import POOL, House, Trader, until
from workflows import names

#: Seconds: two looks of the restorer and its confirmation, on a busy machine.
BACK = 60.0


def temporal(house: House, *words: str) -> str:
    """Runs the `temporal` command."""
    command = [str(Path(sys.executable).with_name("temporal")), *words]
    done = subprocess.run(
        [*command, "--address", house.stack.temporal.address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def end(house: House, how: str, workflow_id: str) -> None:
    if how == "reset":
        temporal(
            house,
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
        temporal(house, "workflow", how, "--workflow-id", workflow_id, *sure)


def pool_view(house: House) -> dict[str, Any] | None:
    answer = house.call("GET", "/v1/pools/default", house.stack.admin_key)
    if answer.status_code == 200:
        found: dict[str, Any] = answer.json()
        return found
    assert answer.status_code == 503, answer.text
    return None


@pytest.mark.parametrize("how", ["terminate", "cancel", "delete", "reset"])
def test_the_pool_is_back_with_the_size_that_operators_had_set(house: House, how: str) -> None:
    before = pool_view(house)
    assert before is not None
    body = {**before["policy"], "target": POOL + 1, "revision": before["revision"]}
    changed = house.call("PUT", "/v1/pools/default", house.stack.admin_key, json=body)
    assert changed.status_code == 200, changed.text
    house.stack.wait_pool(POOL + 1)
    free = house.stack.ready_workers()
    end(house, how, names.worker_pool_id("default"))

    def back() -> dict[str, Any] | None:
        view = pool_view(house)
        return view if view and view["ready"] == POOL + 1 else None

    view = until(back, "pool", BACK)
    assert view["policy"]["target"] == POOL + 1
    assert free <= house.stack.ready_workers()
    if how != "reset":

        def reports_the_rebuild() -> bool:
            """The report is as old as the restorer's last look: the pool answers before it is up
            there."""
            servers = house.call("GET", "/v1/fleet/servers", house.stack.admin_key).json()[
                "servers"
            ]
            pool = servers["pool default"]
            return bool(pool["state"] == "up" and pool["reason"].startswith("rebuilt"))

        until(reports_the_rebuild, "report of the rebuild", BACK)
    body = {**view["policy"], "target": POOL, "revision": view["revision"]}
    assert (
        house.call("PUT", "/v1/pools/default", house.stack.admin_key, json=body).status_code == 200
    )


def worker_of(house: House, trader: Trader) -> dict[str, Any] | None:
    """The lifecycle of an Active worker, as its workflow tells it."""
    answer = house.call("GET", f"/v1/users/{trader.user_id}/worker", trader.api_key)
    if answer.status_code != 200:
        return None
    life: dict[str, Any] | None = answer.json()["lifecycle"]
    return life if life and life["state"] == "Active" else None


@pytest.mark.parametrize("how", ["terminate", "delete", "reset"])
def test_a_user_with_an_order_in_flight_keeps_the_worker(house: House, how: str) -> None:
    trader = house.trader()
    house.start_until_active(trader)
    before = until(lambda: worker_of(house, trader), "active worker")
    pid = house.worker_pid(before["worker_id"])
    slow = Behaviour(latency_ms=3000)
    house.exchange(lambda admin: admin.set_behaviour(trader.account_id, slow))
    answer = house.threads.submit(house.order, trader)
    until(lambda: house.ledger(trader), "order at the exchange")
    end(house, how, names.user_worker_id(trader.user_id))
    placed = answer.result(60)
    assert placed.status_code in (201, 202), placed.text
    after = until(lambda: worker_of(house, trader), "adopted worker", BACK)
    assert after["worker_id"] == before["worker_id"]
    assert house.worker_pid(after["worker_id"]) == pid
    house.exchange(lambda admin: admin.set_behaviour(trader.account_id, Behaviour()))

    def final() -> bool:
        path = f"/v1/orders/{placed.json()['id']}"
        return bool(house.call("GET", path, trader.api_key).json()["state"] == "filled")

    until(final, "final order", BACK)
    second = house.order(trader)
    assert second.status_code == 201, second.text
    assert [order.client_note for order in house.ledger(trader)] == [
        placed.json()["id"],
        second.json()["id"],
    ]
    assert len(house.sessions(trader)) == 1  # it never logged in anew


def test_a_cancelled_workflow_ends_its_worker_in_order(house: House) -> None:
    trader = house.trader()
    house.start_until_active(trader)
    end(house, "cancel", names.user_worker_id(trader.user_id))
    until(lambda: not house.open_sessions(trader), "logout", BACK)
    assert house.order(trader).status_code == 201


def test_a_deleted_schedule_is_made_anew_and_a_paused_one_stays_paused(house: House) -> None:
    def shown() -> dict[str, Any]:
        servers = house.call("GET", "/v1/fleet/servers", house.stack.admin_key).json()["servers"]
        found: dict[str, Any] = servers["schedule maintenance"]
        return found

    schedule = "--schedule-id", names.MAINTENANCE_SCHEDULE
    temporal(house, "schedule", "delete", *schedule)
    until(lambda: shown()["reason"].startswith("rebuilt"), "schedule", BACK)
    temporal(house, "schedule", "toggle", *schedule, "--pause", "--reason", "an operator's wish")
    try:
        metrics = until(
            lambda: _metric(house, 'berth_entities{kind="schedule",state="paused"} 1'),
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
        temporal(house, "schedule", "toggle", *schedule, "--unpause", "--reason", "test")
    until(lambda: shown()["state"] == "up", "schedule", BACK)


def _metric(house: House, line: str) -> bool:
    text = house.call("GET", "/v1/metrics", house.stack.admin_key).text
    name, _, _ = line.partition("{")
    return any(
        found.startswith(name) and 'state="paused"' in found and 'kind="schedule"' in found
        for found in text.splitlines()
    )
