"""Measures what workers cost that trade at the stand-in for Shioaji:
`python -m infra.lab.shioaji.workers [WORKERS]`.

The processes, the SDK's import and its order classes are real; its client is the stand-in, so the
contracts, the order cache and the traffic of a real session are missing. Prints JSON; memory is MiB
of PSS over all processes of a worker, times are seconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

from infra.lab.bench.memory import SETTLE_TIME_S, pss_mib
from infra.lab.rest import RestConnection
from infra.lab.shioaji import keys
from infra.lab.target import Target, own_folder
from infra.local.stack import LocalStack


def measure(workers: int = 30, settle_s: float = SETTLE_TIME_S) -> dict[str, Any]:
    """Measures `workers` idle in the pool, then as many that each hold a session of one user."""
    with ExitStack() as contexts:
        stack = LocalStack(
            contexts.enter_context(own_folder()),
            pool_target=workers,
            live_accounts=True,
            limit_key=0.0,
            limit_user=0.0,
        )
        packages = contexts.enter_context(own_folder())
        contexts.enter_context(keys.on_python_path(packages))
        keys.write_package(packages, stack.settings.exchange_address)
        target = Target(contexts.enter_context(stack))
        target.wait_ready(workers, timeout=300.0)
        time.sleep(settle_s)
        idle = [pss_mib(pid) for pid in target.worker_pids().values()]
        users = target.make_users("sj", workers, broker="shioaji")
        target.pool_update("pause")
        started, active = [], {}
        for user in users:
            connection = RestConnection(target.api_url, user.api_key)
            began = time.monotonic()
            view = connection.call("POST", f"/v1/users/{user.user_id}/worker/start")
            started.append(time.monotonic() - began)
            active[view["worker_id"]] = user
            connection.close()
        time.sleep(settle_s)
        pids = target.worker_pids()
        sizes = [pss_mib(pids[worker_id]) for worker_id in active]
    return {
        "workers": workers,
        "idle_mib": round(statistics.mean(idle), 1),
        "active_mib": round(statistics.mean(sizes), 1),
        "active_all_mib": round(sum(sizes)),
        "start_p50_s": round(statistics.median(started), 3),
        "start_max_s": round(max(started), 3),
    }


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    sys.stdout.write(json.dumps(measure(count), indent=1) + "\n")
