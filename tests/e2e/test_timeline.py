"""One life of a worker, as its timeline tells it afterwards."""

from __future__ import annotations

import os
import signal
from itertools import pairwise

import psutil

from tests.support.systems.local import RunningSystem, Trader, until


def steps(system: RunningSystem, trader: Trader) -> list[tuple[str, str]]:
    path = f"/v1/users/{trader.user_id}/worker/timeline"
    answer = system.call("GET", path, trader.api_key)
    assert answer.status_code == 200, answer.text
    return [(step["before"], step["after"]) for step in answer.json()["transitions"]]


def session_pid(system: RunningSystem, worker_id: str) -> int:
    """The process that holds the broker's session: a child of the worker's first one."""
    [shown_step] = [
        child.pid
        for child in psutil.Process(system.worker_pid(worker_id)).children()
        if "session" in child.name()
    ]
    return shown_step


def test_the_timeline_has_a_life_from_the_first_claim_to_the_end(system: RunningSystem) -> None:
    trader = system.trader()
    worker_id = system.start_until_active(trader)["worker_id"]
    os.kill(session_pid(system, worker_id), signal.SIGKILL)
    until(
        lambda: ("Reconnecting", "Active") in steps(system, trader), "a session replaced in place"
    )
    system.kill_worker(worker_id)
    until(lambda: steps(system, trader).count(("Connecting", "Active")) == 2, "another worker")
    stopped = system.call("POST", f"/v1/users/{trader.user_id}/worker/stop", trader.api_key)
    assert stopped.is_success, stopped.text
    until(lambda: ("Draining", "Terminated") in steps(system, trader), "the end")
    shown = steps(system, trader)
    start = [("Claimed", "Connecting"), ("Connecting", "Active")]
    assert shown == [
        ("PoolIdle", "Claimed"),
        *start,
        ("Active", "Reconnecting"),
        ("Reconnecting", "Active"),
        ("Active", "Failed"),
        ("Failed", "Claimed"),
        *start,
        ("Active", "Draining"),
        ("Draining", "Terminated"),
    ]
    assert all(before[1] == after[0] for before, after in pairwise(shown))
