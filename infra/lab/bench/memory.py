"""`berth bench memory`: what a worker costs, as PSS over all its processes (MiB).

PSS counts a page that several processes share by its share, so that the sum over all workers is
what the host really gives.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil

from infra.lab import figures
from infra.lab.rest import RestConnection
from infra.lab.target import Target, running

#: Seconds after which a fresh worker no longer grows.
SETTLE_TIME_S = 8.0


def pss_mib(pid: int) -> float:
    """Returns the PSS of a process and its descendants, MiB."""
    root = psutil.Process(pid)
    kib = 0
    for process in (root, *root.children(recursive=True)):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        kib += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 1024


def _mean(target: Target, only: set[str] | None = None) -> float:
    pids = target.worker_pids()
    sizes = [pss_mib(pid) for worker_id, pid in pids.items() if only is None or worker_id in only]
    return sum(sizes) / len(sizes)


def run(workers: int = 10, settle: float = SETTLE_TIME_S) -> dict[str, Any]:
    """Measures one idle worker alone, then `workers` of them, then an active one next to them.

    Each time it waits `settle` seconds first.
    """
    with running(pool_target=1) as target:
        target.wait_ready(1)
        time.sleep(settle)
        alone = _mean(target)
        target.pool_update("set_target", {"target": workers})
        target.wait_ready(workers)
        time.sleep(settle)
        idle = _mean(target)
        [user] = target.make_users("holder", 1)
        connection = RestConnection(target.api_url, user.api_key)
        started = connection.call("POST", f"/v1/users/{user.user_id}/worker/start")
        connection.close()
        time.sleep(settle)
        active = _mean(target, {started["worker_id"]})
    return {
        "workers": workers,
        "idle_pss_mib": round(idle, 1),
        "idle_alone_pss_mib": round(alone, 1),
        "active_pss_mib": round(active, 1),
    }


def table(result: dict[str, Any]) -> None:
    figures.print_table(
        "memory: PSS of a worker, all its processes (MiB)",
        [
            (f"idle in the pool, {result['workers']} of them", str(result["idle_pss_mib"])),
            ("idle in the pool, alone", str(result["idle_alone_pss_mib"])),
            ("active, paper broker", str(result["active_pss_mib"])),
        ],
    )
