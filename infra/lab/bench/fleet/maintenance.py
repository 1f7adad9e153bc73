"""`berth bench maintenance`: how long a pass takes for ten
thousand workers, a tenth of them with an anomaly.

Orchestrator, Temporal, PostgreSQL and Valkey are real. The workers are names: assignments
in PostgreSQL, marks and pool entries in Valkey, and tasks of a node that lists and ends
them. Passes are started here in the schedule's place. The first two only scan, the third
cleans up and is measured: `scan_s` is its scan of all workers, `total_s` its workflow from
start to end, with all children.

`work` is what that pass cost the servers: CPU seconds, questions to the launcher and tasks in
its answers, commands to Valkey and bytes of its answers. It is counted, so that a busy
machine does not change it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.engine import Database
from infra.database.workers import passes
from infra.database.workers.passes import MaintenancePass
from infra.lab import figures
from infra.lab.bench.fleet.planted_fleet import PlantedFleet
from infra.lab.cpu import cpu_seconds
from infra.lab.figures import Say, silent
from infra.lab.target import own_folder
from infra.launchers.process import ProcessLauncher
from infra.local.components import NodeComponent
from infra.local.process import ServerFailed
from infra.local.stack import LocalStack
from infra.settings import Settings
from infra.temporal.connection import open_client
from worker_runtime.protocol import keys

#: As in `workflows.names`, which this room must not import.
_WORKFLOW, _QUEUE = "MaintenanceWorkflow", "berth-bulk"
#: The number of workers of which one has an anomaly.
WORKERS_PER_ANOMALY = 10
#: Seconds until the orchestrator's other loops have taken the planted fleet in.
_SETTLE_TIME_S = 2.0
#: More seconds than there must be between two passes (`activities/maintenance/passes.py`).
_PASS_AGE_S = 60.0


class _PlantedNode(NodeComponent):
    module = "infra.lab.bench.fleet.planted_node"
    keeps_children = False

    def __init__(self, directory: Path, settings: Settings, planted: Path) -> None:
        super().__init__(directory, settings)
        self._planted = planted

    def command(self) -> Sequence[str]:
        return [*super().command(), str(self._planted)]


class _PlantedStack(LocalStack):
    """A stack without a pool and without the maintenance schedule."""

    def __init__(self, directory: Path, planted: Path) -> None:
        super().__init__(directory, durable=False, pool_target=0, maintenance_period=0.0)
        real = self.node
        node = _PlantedNode(real.directory, self.settings, planted)
        node.log_path, node.records = real.log_path, real.records
        self.node = node
        #: Written by the node at each ping.
        self.counts = planted.with_name(f"{planted.name}.counts")
        self.servers = tuple(node if server is real else server for server in self.servers)


def run(workers: Sequence[int] = (1000, 10_000, 20_000), say: Say = silent) -> dict[str, Any]:
    """Measures each size. The top level has the figures of 10,000 workers, else of the last size.

    Raises `ServerFailed`.
    """
    sizes = {str(count): _measure_size(count, say) for count in workers}
    return {**sizes.get("10000", list(sizes.values())[-1]), "sizes": sizes}


def _measure_size(workers: int, say: Say) -> dict[str, Any]:
    planted = PlantedFleet(workers, workers // WORKERS_PER_ANOMALY)
    say(f"maintenance: planting {workers} workers")
    with own_folder() as folder:
        tasks = folder / "planted.json"
        tasks.write_bytes(msgspec.json.encode(planted.tasks))
        with _PlantedStack(folder / "data", tasks) as stack:
            return asyncio.run(_measure(stack, planted, say))


async def _measure(stack: _PlantedStack, planted: PlantedFleet, say: Say) -> dict[str, Any]:
    settings = stack.settings
    database = Database(settings.database_url)
    client = await open_client(settings)
    try:
        with Redis.from_url(settings.valkey_url) as valkey:
            planted.into_valkey(valkey)
            valkey.set(keys.GENERATION, "planted", nx=True)
            await planted.into_database(database)
            await asyncio.sleep(_SETTLE_TIME_S)
            rounds = []
            for number, name in enumerate(("first pass", "second pass", "clean up", "afterwards")):
                say(f"maintenance: {planted.workers} workers, {name}")
                before, began = await _work(stack, valkey), time.monotonic()
                await client.execute_workflow(
                    _WORKFLOW,
                    {"batch": 100, "abreast": 4},
                    id=f"maintenance-{number}",
                    task_queue=_QUEUE,
                )
                seconds = time.monotonic() - began
                work = {
                    name: total - before[name]
                    for name, total in (await _work(stack, valkey)).items()
                }
                async with database.session() as session:
                    shown = await passes.pass_summary(session)
                if shown is None:
                    raise ServerFailed(
                        f"the pass was not written down:\n{stack.orchestrator.log_tail()}"
                    )
                rounds.append((shown, seconds, work))
                async with database.session() as session:
                    await _age_passes(session)
    finally:
        await database.close()
        await asyncio.sleep(0.1)  # the client's threads end before the loop does (sdk-python#300)
    cleaned, seconds, work = rounds[2]
    after, quiet_seconds, quiet_work = rounds[3]
    done = sum(cleaned.outcomes.values())
    if cleaned.guarded or done != planted.anomalies:
        raise ServerFailed(
            f"{done} of {planted.anomalies} anomalies cleaned up: {cleaned.found} "
            f"{cleaned.outcomes} {cleaned.guarded}\n{stack.orchestrator.log_tail()}"
        )
    return {
        "workers": planted.workers,
        "anomalies": planted.anomalies,
        "scan_s": round(cleaned.scan_seconds, 3),
        "total_s": round(seconds, 3),
        "quiet_total_s": round(quiet_seconds, 3),
        "left": sum(after.found.values()),
        "found": cleaned.found,
        "outcomes": cleaned.outcomes,
        "work": {name: round(amount, 2) for name, amount in work.items()},
        "quiet_work": {name: round(amount, 2) for name, amount in quiet_work.items()},
    }


async def _age_passes(session: AsyncSession) -> None:
    """Makes all passes older, so that the next one confirms what the last one saw without a
    wait."""
    older = update(MaintenancePass).values(
        began_at=MaintenancePass.began_at - timedelta(seconds=_PASS_AGE_S),
        boottime=MaintenancePass.boottime - _PASS_AGE_S,
    )
    await session.execute(older)


#: With these the watch of quotas walks over all names,
#: by a clock of its own, whatever maintenance does.
_OF_THE_QUOTA_WATCH = {"scan", "type", "strlen", "hlen", "llen", "zcard", "scard", "memory|usage"}


async def _work(stack: _PlantedStack, valkey: Redis) -> dict[str, float]:
    """Return what all servers have done so far, by kind."""
    cpu = {f"{server.name}_cpu_s": cpu_seconds(server.pid) for server in stack.servers}
    await ProcessLauncher(stack.settings.node_socket).ping()
    asked = msgspec.json.decode(stack.counts.read_bytes(), type=dict[str, int])
    commands: Any = valkey.info("commandstats")
    traffic: Any = valkey.info("stats")
    return {
        "cpu_s": sum(cpu.values()),
        **cpu,
        "launcher_requests": asked.get("requests", 0),
        "launcher_listings": asked.get("ListTasks", 0),
        "launcher_tasks": asked.get("tasks", 0),
        "valkey_commands": sum(
            command["calls"]
            for name, command in commands.items()
            if name.removeprefix("cmdstat_") not in _OF_THE_QUOTA_WATCH
        ),
        "valkey_bytes": traffic["total_net_output_bytes"],
    }


def table(result: dict[str, Any]) -> None:
    rows = [
        (
            f"{size['workers']} workers, {size['anomalies']} anomalies",
            f"scan of all {size['scan_s']} s   "
            f"whole pass {size['total_s']} s, {size['work']['cpu_s']} CPU-s   "
            f"a pass that finds nothing {size['quiet_total_s']} s",
        )
        for size in result["sizes"].values()
    ]
    figures.print_table("maintenance: a pass that cleans up", rows)
