"""`berth bench idle`: what active users cost Temporal while nothing happens.

All servers and the orchestrator are real; the workers are simulated (`fleet/simulated`), so that
thousands fit on one host. After all users have become Active comes the rest: actions are counted
from the histories, CPU is measured from outside. The idle timeout is so long that it does not fire,
and no morning connects users. Then our orchestrator and API are stopped, and the same servers run
as many naive workflows, which poll every minute, for the same time.

At rest nothing fires, so a second figure says what users cost who are active all the time: each
idle timeout ends in a check that finds them used. A short timeout is run for many periods, and what
one period costs is scaled to the default timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from temporalio.client import Client

from infra.lab import figures
from infra.lab.bench.fleet import actions
from infra.lab.bench.fleet.polling_workflow import CHECK_INTERVAL_S
from infra.lab.bench.fleet.polling_workflow import WORKFLOW_NAME as NAIVE
from infra.lab.bench.fleet.simulated.worker import SimulatedBehaviour
from infra.lab.bench.fleet.stack import PollingWorker, SimulatedStack, start_polling
from infra.lab.cpu import CpuShare
from infra.lab.figures import Say, silent
from infra.lab.marks import MarkPoller
from infra.lab.rest import RequestFailed, RestConnection
from infra.lab.target import BenchUser, Target, running
from infra.local.process import ServerFailed
from infra.settings import Settings
from infra.temporal.connection import open_client

#: Warm workers, as `berth up` keeps them: the pool's own workflow is part of the cost.
_POOL_SIZE = 4
#: Seconds; nothing fires within the rest.
_IDLE_TIMEOUT_S = 7 * 86400.0
#: Seconds after the last start until the rest begins: events, timelines and refills have been dealt
#: with. In the other phases, one that is shorter itself (in a trial run) waits for no longer than
#: its own length.
_SETTLE_TIME_S = 15.0
#: Seconds in which the servers are measured without any user.
_BASELINE_TIME_S = 15.0
#: Users that are started at once.
#: The dev server makes 60 to 90 starts a second whatever the number.
_MAX_CONCURRENT_STARTS = 24
#: Seconds until the pool must have launched all workers.
_LAUNCH_TIMEOUT_S = 900.0
#: Seconds until one user has to be Active.
_START_TIMEOUT_S = 300.0
#: The number of users that are active all the time, their idle timeout, and how often they show
#: activity (s).
_USED_USERS = 20
_USED_TIMEOUT_S = 5.0
_USED_MARK_INTERVAL_S = 1.0

T = TypeVar("T")


def run(
    workers: Sequence[int] = (500, 2000),
    minutes: float = 10.0,
    settle: float = _SETTLE_TIME_S,
    base: float = _BASELINE_TIME_S,
    say: Say = silent,
) -> dict[str, Any]:
    """Measures one rest and one naive phase for each number of `workers`, of `minutes` each.

    `settle` and `base` are seconds: the wait before each phase, and the phase without users.
    """
    sizes = [_measure_rest(count, minutes * 60, settle, base, say) for count in workers]
    used = _measure_used(minutes * 60, settle, say)
    return {
        **sizes[0],
        "used_actions_per_hour": used["actions_per_hour"],
        "used": used,
        "sizes": {str(size["workers"]): size for size in sizes},
    }


def _measure_rest(
    workers: int, seconds: float, settle: float, base_seconds: float, say: Say
) -> dict[str, Any]:
    stacked = partial(SimulatedStack, habits=SimulatedBehaviour())
    with running(_POOL_SIZE, stacked, idle_timeout=_IDLE_TIMEOUT_S, morning_at="") as target:
        stack = target.stack
        pids = {"server": stack.temporal.pid, "orchestrator": stack.orchestrator.pid}
        base = CpuShare(pids)
        _pause(min(base_seconds, seconds), partial(_say_left, say, "idle: no users yet"))
        base_cpu = base.percent()
        users = _make_active(target, workers, settle, say)
        ours = CpuShare(pids)
        began = datetime.now(UTC)
        _pause(seconds, partial(_say_left, say, f"idle: {workers} users at rest"))
        ours_cpu = ours.percent()
        ended = datetime.now(UTC)
        still = _active(target, users)
        say(f"idle: {workers} users, reading the histories")
        counted = _with_temporal(target, lambda client: actions.count(client, began, ended))
        stack.api.stop()
        stack.orchestrator.stop()
        naive, naive_cpu = _measure_naive(target, users, seconds, settle, say)
    hours = (ended - began).total_seconds() / 3600
    total = sum(counted.values(), Counter())
    return {
        "workers": workers,
        "minutes": round(hours * 60, 2),
        "active_at_the_end": still,
        "actions_per_hour": _rate(total, workers, hours),
        "actions": dict(total),
        "actions_by_workflow": {name: dict(kinds) for name, kinds in counted.items() if kinds},
        "server_cpu_pct": ours_cpu["server"],
        "orchestrator_cpu_pct": ours_cpu["orchestrator"],
        "base_server_cpu_pct": base_cpu["server"],
        "base_orchestrator_cpu_pct": base_cpu["orchestrator"],
        "naive_period_s": CHECK_INTERVAL_S,
        "naive_actions_per_hour": _rate(naive, workers, seconds / 3600),
        "naive_server_cpu_pct": naive_cpu["server"],
        "naive_worker_cpu_pct": naive_cpu["worker"],
    }


def _measure_naive(
    target: Target, users: Sequence[BenchUser], seconds: float, settle: float, say: Say
) -> tuple[Counter[str], dict[str, float]]:
    """Measures actions and CPU of as many naive workflows. Our orchestrator is stopped."""
    names = [user.user_id for user in users]

    def say_started(started: int) -> None:
        say(f"idle: {started} of {len(names)} naive workflows started")

    folder: Path = target.stack.folder.path
    with PollingWorker(folder / "polling", target.settings) as worker:
        _with_temporal(target, lambda client: start_polling(client, names, say_started))
        _pause(min(settle, seconds), partial(_say_left, say, "idle: naive workflows settle"))
        share = CpuShare({"server": target.stack.temporal.pid, "worker": worker.pid})
        began = datetime.now(UTC)
        _pause(
            seconds,
            partial(_say_left, say, f"idle: {len(names)} naive workflows poll every minute"),
        )
        cpu = share.percent()
        ended = datetime.now(UTC)
        counted = _with_temporal(target, lambda client: actions.count(client, began, ended))
    return counted.get(NAIVE, Counter()), cpu


def _measure_used(seconds: float, settle: float, say: Say) -> dict[str, Any]:
    """Measures what users cost that are active all the time, scaled to the default idle timeout."""
    seconds = min(max(seconds, 2 * _USED_TIMEOUT_S), 60.0)
    stack = partial(SimulatedStack, habits=SimulatedBehaviour(used=True))
    with running(
        _POOL_SIZE, stack, idle_timeout=_USED_TIMEOUT_S, mark_period=_USED_MARK_INTERVAL_S
    ) as target:
        users = _make_active(target, _USED_USERS, min(settle, seconds), say)
        began = datetime.now(UTC)
        _pause(
            seconds,
            partial(_say_left, say, f"idle: {len(users)} users that are active all the time"),
        )
        ended = datetime.now(UTC)
        still = _active(target, users)
        counted = _with_temporal(target, lambda client: actions.count(client, began, ended))
    own = counted.get("UserWorkerWorkflow", Counter())
    if still != len(users) or not own["timers"]:
        raise ServerFailed(f"{still} of {len(users)} users that are in use are Active: {dict(own)}")
    timeout = float(Settings.model_fields["idle_timeout"].default)
    a_period = own.total() / own["timers"]
    return {
        "workers": len(users),
        "idle_timeout_s": _USED_TIMEOUT_S,
        "periods": own["timers"],
        "actions_per_period": round(a_period, 3),
        "scaled_to_idle_timeout_s": timeout,
        "actions_per_hour": round(a_period * 3600 / timeout, 3),
    }


def _start(admin: RestConnection, user_id: str) -> None:
    """Starts a user's worker, again while the start is refused because others fill the server.

    Raises `ServerFailed` after `_START_TIMEOUT_S` seconds.
    """
    until = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            if "worker_id" in admin.call("POST", f"/v1/users/{user_id}/worker/start?wait=60"):
                return
            why = "still starting"
        except RequestFailed as error:
            why = error.detail
        if time.monotonic() > until:
            raise ServerFailed(f"{user_id} was not Active within {_START_TIMEOUT_S:.0f} s: {why}")
        time.sleep(0.5)


def _make_active(target: Target, count: int, settle: float, say: Say) -> list[BenchUser]:
    """Registers users, makes each Active through the API, and waits `settle` seconds more.

    All of them get a worker from the pool, as most do in real life: it is filled for them first,
    and paused, since a refill after each claim would only take the starts' time.
    """
    say(f"idle: registering {count} users")
    users = target.make_users("idle", count, at_exchange=False)
    target.pool_update("set_target", {"target": count})
    until = time.monotonic() + _LAUNCH_TIMEOUT_S
    while (launched := len(target.workers())) < count:
        if time.monotonic() > until:
            raise ServerFailed(
                f"{launched} of {count} simulated workers after {_LAUNCH_TIMEOUT_S:.0f} s"
            )
        say(f"idle: {launched} of {count} simulated workers launched")
        time.sleep(0.5)
    target.wait_ready(count)
    target.pool_update("pause")
    target.pool_update("set_target", {"target": _POOL_SIZE})
    done: list[str] = []

    def start(share: Sequence[BenchUser]) -> None:
        admin = target.admin()
        try:
            for user in share:
                _start(admin, user.user_id)
                done.append(user.user_id)
                say(f"idle: {len(done)} of {count} users active")
        finally:
            admin.close()

    with ThreadPoolExecutor(max_workers=_MAX_CONCURRENT_STARTS) as threads:
        for future in [
            threads.submit(start, users[n::_MAX_CONCURRENT_STARTS])
            for n in range(_MAX_CONCURRENT_STARTS)
        ]:
            future.result()
    target.pool_update("resume")
    target.wait_ready(_POOL_SIZE)
    _pause(settle, partial(_say_left, say, f"idle: {count} users settle"))
    return users


def _active(target: Target, users: Sequence[BenchUser]) -> int:
    """Counts the users with a worker that says it is Active."""
    marks = MarkPoller(target.settings.valkey_url)
    try:
        return sum(marks.read_mark(user.user_id).state == "Active" for user in users)
    finally:
        marks.close()


def _rate(counted: Counter[str], workers: int, hours: float) -> float:
    return round(counted.total() / workers / hours, 3)


def _pause(seconds: float, on_progress: Callable[[float], None]) -> None:
    """Rests; `on_progress` gets the seconds that are left."""
    until = time.monotonic() + seconds
    while (remaining := until - time.monotonic()) > 0:
        on_progress(remaining)
        time.sleep(min(remaining, 1.0))


def _say_left(say: Say, phase: str, remaining: float) -> None:
    say(f"{phase}, {remaining:.0f} s left")


def _with_temporal(target: Target, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    async def connected() -> T:
        client = await open_client(target.settings)
        result = await work(client)
        await asyncio.sleep(0.1)  # the client's threads end before the loop does (sdk-python#300)
        return result

    return asyncio.run(connected())


def table(result: dict[str, Any]) -> None:
    rows = []
    for size in result["sizes"].values():
        head = f"{size['workers']} users, {size['minutes']:g} min"
        rows += [
            (
                f"{head}: ours at rest",
                f"{size['actions_per_hour']} actions a worker-hour   server "
                f"{size['server_cpu_pct']} %   "
                f"orchestrator {size['orchestrator_cpu_pct']} %",
            ),
            (
                f"{head}: naive, a poll a minute",
                f"{size['naive_actions_per_hour']} actions a worker-hour   "
                f"server {size['naive_server_cpu_pct']} %   worker "
                f"{size['naive_worker_cpu_pct']} %",
            ),
            (
                "the same servers without users",
                f"server {size['base_server_cpu_pct']} %   "
                f"orchestrator {size['base_orchestrator_cpu_pct']} %",
            ),
        ]
    used = result["used"]
    rows.append(
        (
            "users active all the time",
            f"{used['actions_per_hour']} actions a worker-hour: {used['actions_per_period']} a "
            "period, "
            f"measured over {used['periods']} periods of {used['idle_timeout_s']:g} s, "
            f"scaled to {used['scaled_to_idle_timeout_s']:g} s",
        )
    )
    figures.print_table("idle: Temporal actions and CPU (% of one core) of users at rest", rows)
