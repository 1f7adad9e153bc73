"""`berth bench heartbeat`: is a mark ever renewed late, whatever starves or blocks the worker?

A real worker (zygote, supervisor, session) runs in a cgroup with a CPU quota, with so much load
next to it that the quota throttles, and its session hangs in broker calls of a minute. Next to it,
in the same cgroup and for the same time, the naive design: an asyncio task in the session's loop
that renews the mark, while a call of the same length blocks that loop. Valkey, the paper exchange
and the watch are outside the cgroup; the watch takes the times from Valkey's clock.

A quota throttles only where the group could use more: one of as many CPUs as the host has (2 on 2
cores), or on a host that is busy with other things, may never be used up. So `nr_throttled` is part
of the result.

The broker call is an order at the paper exchange that answers after that minute. A broker
call may not outlast the lease, so the mark lives for longer than the call here; it is
renewed every 5 s as always.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from infra.exchange.behaviour import Behaviour
from infra.exchange.client import ExchangeAdmin, ExchangeServer
from infra.lab import figures
from infra.lab.bench.starvation.claimed_worker import (
    EPOCH,
    ClaimedWorker,
    HangingCalls,
    OrchestratorCommands,
)
from infra.lab.bench.starvation.cpu_group import CpuGroup, cpu_group
from infra.lab.bench.starvation.naive_heartbeat import NaiveHeartbeat
from infra.lab.bench.starvation.renewal_watch import LATE_TOLERANCE_S, RenewalWatch, judge_renewals
from infra.lab.figures import Say, silent
from infra.lab.target import own_folder
from infra.local.servers import ValkeyServer
from infra.processes import end_with_parent
from worker_runtime.protocol import keys
from worker_runtime.protocol.requests import OPEN_SWITCH

#: The kinds of load that keep the CPUs busy, and the number of each.
LOAD_SIZES = {"processes": 64, "threads": 240}
#: Percent of one core: two CPUs, then one. A host of two cores throttles at 95 % of them, not at
#: 100.
CPU_QUOTAS_PERCENT = (min(200, 95 * (os.cpu_count() or 1)), 100)
#: Seconds that a broker call blocks.
_BLOCK_TIME_S = 60.0
#: Seconds of pause before each blocking call.
_PAUSE_TIME_S = 15.0


@dataclass(frozen=True)
class HeartbeatSetup:
    """The servers outside the cgroup, and where the processes' logs go."""

    folder: Path
    commands: OrchestratorCommands
    exchange: ExchangeServer
    mark_period: float


def run(
    seconds: float = 300.0,
    quotas: Sequence[int] = CPU_QUOTAS_PERCENT,
    loads: Sequence[str] = tuple(LOAD_SIZES),
    mark_period: float = 5.0,
    say: Say = silent,
) -> dict[str, Any]:
    """Measures each quota (percent of one core) with each load, for `seconds`. Raises
    `LimitsUnavailable`."""
    by_quota: dict[str, Any] = {}
    with ExitStack() as closing:
        folder = closing.enter_context(own_folder())
        valkey = closing.enter_context(ValkeyServer(folder / "valkey", durable=False))
        exchange = closing.enter_context(ExchangeServer(folder / "exchange"))
        commands = OrchestratorCommands(valkey.url)
        closing.callback(commands.close)
        stage = HeartbeatSetup(folder, commands, exchange, mark_period)
        for quota in quotas:
            parts = {load: _measure(stage, seconds, quota, load, say) for load in loads}
            by_quota[str(quota)] = {**_summarize(list(parts.values())), "by_load": parts}
    return {
        **_summarize(list(by_quota.values())),
        "seconds": seconds,
        "mark_period_s": mark_period,
        "late_after_s": mark_period + LATE_TOLERANCE_S,
        "by_quota": by_quota,
    }


def _summarize(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {
        name: sum(part[name] for part in parts)
        for name in (
            "late",
            "renewals",
            "naive_late",
            "naive_renewals",
            "nr_throttled",
            "nr_periods",
        )
    }
    for name in ("max_gap_s", "naive_max_gap_s", "longest_call_s"):
        total[name] = max(part[name] for part in parts)
    return total


def _measure(
    stage: HeartbeatSetup, seconds: float, quota: int, load: str, say: Say
) -> dict[str, Any]:
    block, pause = min(_BLOCK_TIME_S, seconds / 2), min(_PAUSE_TIME_S, seconds / 4)
    name = f"{quota}-{load}"
    worker = ClaimedWorker(
        stage.commands,
        f"user-{name}",
        stage.exchange.address,
        block=block,
        mark_period=stage.mark_period,
    )
    asyncio.run(_register(stage.exchange.admin_url, worker, block))
    naive = NaiveHeartbeat(
        url=stage.commands.url,
        user_id=f"naive-{name}",
        worker_id=f"naive-{name}",
        epoch=EPOCH,
        mark_period=worker.config.mark_period,
        mark_ttl=worker.config.mark_ttl,
        block=block,
        pause=pause,
    )
    stage.commands.own(naive.user_id, naive.worker_id, OPEN_SWITCH.words((), naive.user_id))
    marks = (keys.mark(worker.user_id), keys.mark(naive.user_id))
    say(f"heartbeat: quota {quota} %, starting")
    with ExitStack() as ending:
        watch = ending.enter_context(RenewalWatch(stage.commands.url, marks))
        group = ending.enter_context(cpu_group(f"berth-bench-{os.getpid()}-{name}", quota))
        worker.start(stage.folder / name, group)
        _start(
            group,
            "infra.lab.bench.starvation.naive_heartbeat",
            msgspec.json.encode(naive) + b"\n",
            ending,
        )
        words = ("infra.lab.bench.starvation.cpu_load", load, str(LOAD_SIZES[load]))
        _start(group, " ".join(words), b"go\n", ending)
        calls = HangingCalls(worker, block=block, pause=pause)
        calls.start()
        ending.callback(calls.end)
        began, before = watch.now(), group.throttling()
        until = time.monotonic() + seconds
        while (remaining := until - time.monotonic()) > 0:
            say(
                f"heartbeat: quota {quota} %, {LOAD_SIZES[load]} busy {load}, "
                f"{remaining:.0f} s left"
            )
            time.sleep(min(1.0, remaining))
        throttling = group.throttling() - before
        ended = watch.now()
        ours = judge_renewals(watch.times(marks[0]), began, ended, worker.config.mark_period)
        theirs = judge_renewals(watch.times(marks[1]), began, ended, naive.mark_period)
    worker.wait()
    return {
        "late": ours.late,
        "renewals": ours.count,
        "max_gap_s": ours.max_gap,
        "naive_late": theirs.late,
        "naive_renewals": theirs.count,
        "naive_max_gap_s": theirs.max_gap,
        "nr_throttled": throttling.throttled,
        "nr_periods": throttling.periods,
        "throttled_s": throttling.seconds,
        "calls": len(calls.took),
        "longest_call_s": round(max(calls.took, default=0.0), 1),
    }


def _start(group: CpuGroup, module: str, line: bytes, ending: ExitStack) -> None:
    """Starts one of our modules inside the group; it waits for the line before it does anything."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", *module.split(" ")],
        stdin=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=end_with_parent(os.getpid()),
    )
    ending.callback(process.wait, 10)
    ending.callback(process.kill)
    group.add(process.pid)
    assert process.stdin is not None  # noqa: S101 — a pipe was asked for
    ending.callback(process.stdin.close)
    process.stdin.write(line)
    process.stdin.flush()


async def _register(url: str, worker: ClaimedWorker, block: float) -> None:
    """Registers an account at the exchange whose every order is answered after `block` seconds."""
    async with ExchangeAdmin(url) as exchange:
        await exchange.register(worker.account_id, "key", "secret", person_id=worker.user_id)
        await exchange.set_behaviour(worker.account_id, Behaviour(latency_ms=int(block * 1000)))


def table(result: dict[str, Any]) -> None:
    rows = []
    cores = len(os.sched_getaffinity(0))
    for quota, part in result["by_quota"].items():
        for load, seen in part["by_load"].items():
            head = (
                f"quota {quota} %{' (all cores)' if int(quota) >= cores * 100 else ''}, "
                f"{LOAD_SIZES[load]} {load}"
            )
            rows += [
                (
                    f"{head}: throttled",
                    f"{seen['nr_throttled']} of {seen['nr_periods']} periods, "
                    f"{seen['throttled_s']:g} s   "
                    f"{seen['calls']} broker calls answered, the longest after "
                    f"{seen['longest_call_s']} s",
                ),
                (
                    f"{head}: ours",
                    f"late {seen['late']} of {seen['renewals']}   "
                    f"longest gap {seen['max_gap_s']} s",
                ),
                (
                    f"{head}: naive",
                    f"late {seen['naive_late']}, renewed {seen['naive_renewals']} times   "
                    f"longest gap {seen['naive_max_gap_s']} s",
                ),
            ]
    figures.print_table(
        f"heartbeat: renewals later than {result['late_after_s']:g} s after the last one, "
        f"{result['seconds']:g} s each",
        rows,
    )
