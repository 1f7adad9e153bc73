"""`berth bench density`: many workers as containers on one machine, while a neighbour eats memory.

All of them are active, and their users place orders at a steady rate (open loop). Meanwhile
containers with a worker's limits take memory until the kernel kills them, one after the other. The
same run measures the same orders without that neighbour.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from infra.lab import docker, figures
from infra.lab.bench.memory import pss_mib
from infra.lab.bench.order import order_body, send_order
from infra.lab.cpu import cpu_seconds
from infra.lab.docker import DockerDaemon
from infra.lab.rest import RequestFailed, RestConnection
from infra.lab.target import BenchUser, Target, own_folder, running
from infra.lab.worker_image import ImageBuilder
from infra.lab.worker_image import why_not_buildable as no_image
from infra.launchers.docker import container
from infra.launchers.docker.engine import DockerEngine
from infra.settings import Settings
from infra.worker_task import LaunchSpec
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.launch import WorkerConfig

#: The paper broker needs no SDK.
_IMAGE = "berth-worker:density"
#: Seconds after which a fresh worker no longer grows, and over which CPU at rest is taken.
_SETTLE_TIME_S = 8.0
#: Orders of a user before the measurement: its first one takes longer.
_WARM_UP_ORDERS = 3
#: The real broker bans a person beyond 250; this measures our path, not that limit.
_ORDERS_PER_10S = 1_000_000
_MAX_CONCURRENT_STARTS = 8
#: Takes memory as fast as it can; the kernel kills it at the limit of its container.
_HOG_PROGRAM = "taken = []\nwhile True: taken.append(b'x' * 4194304)"

Say = Callable[[str], None]


class DockerNotHere(BerthError, code="DOCKER_NOT_HERE"):
    """Real containers cannot be had on this machine."""


@contextlib.contextmanager
def _daemon() -> Iterator[tuple[Path, str]]:
    """Yields socket and image of the daemon in the settings if it has the image, else of one of our
    own."""
    settings = Settings()
    if docker.docker_answers(settings.docker_socket):
        yield settings.docker_socket, settings.docker_image
        return
    reason = docker.why_no_docker() or no_image()
    if reason:
        raise DockerNotHere(
            f"no daemon answers at {settings.docker_socket}, and none can be started: {reason}"
        )
    with own_folder() as folder, DockerDaemon(folder) as daemon:
        ImageBuilder(daemon.host).provide(_IMAGE)
        yield daemon.socket, _IMAGE


class MemoryHog:
    """Containers with a worker's limits that eat memory, one after the other."""

    def __init__(self, socket: Path, image: str) -> None:
        self._socket = socket
        self._image = image
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._eat()))
        #: The number of containers that the kernel has killed.
        self.killed = 0

    def __enter__(self) -> MemoryHog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    async def _eat(self) -> None:
        config = WorkerConfig(
            worker_id="eater",
            pool="",
            valkey_url="",
            launch_token=b"",
            orchestrator_keys=(bytes(32),),
        )
        made = container.container_document(
            LaunchSpec(config=config),
            image=self._image,
            network="none",
            fleet="berth-eater",
            now=time.time(),
        )
        made |= {"Entrypoint": ["python", "-c", _HOG_PROGRAM], "Cmd": []}
        async with DockerEngine(self._socket) as engine:
            while not self._over.is_set():
                name = f"berth-eater-{time.time_ns()}"
                container_id = await engine.create(name, made)
                if container_id is None:
                    continue
                await engine.start(container_id, b"")
                ended = await engine.wait_ended(container_id, 60.0)
                known = await engine.inspect(container_id)
                self.killed += bool(ended and known and known["State"]["OOMKilled"])
                await engine.signal(container_id, "SIGKILL")
                await engine.wait_ended(container_id, 10.0)
                await engine.remove(container_id)


def _start_workers(target: Target, users: list[BenchUser], say: Say) -> None:
    """Starts a worker for every user, and warms it up with orders."""
    done = 0

    def start(user: BenchUser) -> None:
        nonlocal done
        connection = RestConnection(target.api_url, user.api_key)
        try:
            connection.call("POST", f"/v1/users/{user.user_id}/worker/start")
            for _ in range(_WARM_UP_ORDERS):
                send_order(connection, user)
        finally:
            connection.close()
        done += 1
        say(f"measuring: density, {done} of {len(users)} workers are active")

    with ThreadPoolExecutor(_MAX_CONCURRENT_STARTS) as threads:
        list(threads.map(start, users))


def _measure_orders(
    target: Target, users: list[BenchUser], seconds: float, per_second: float
) -> list[float]:
    """Returns the seconds from when each order was due to its answer."""
    began = time.monotonic() + 0.5
    period = len(users) / per_second
    count = max(1, int(seconds / period))
    taken: list[list[float]] = [[] for _ in users]

    def trade(number: int, user: BenchUser) -> None:
        connection = RestConnection(target.api_url, user.api_key)
        try:
            for turn in range(count):
                due = began + turn * period + number / per_second
                time.sleep(max(0.0, due - time.monotonic()))
                order = connection.call(
                    "POST", f"/v1/users/{user.user_id}/orders", order_body(user)
                )
                if order["state"] != "filled":
                    raise RequestFailed(f"the order is {order['state']}: {order}")
                taken[number].append(time.monotonic() - due)
        finally:
            connection.close()

    with ThreadPoolExecutor(len(users)) as threads:
        for future in [threads.submit(trade, number, user) for number, user in enumerate(users)]:
            future.result()
    return [latency for latencies in taken for latency in latencies]


def run(
    workers: int = 30,
    seconds: float = 30.0,
    rate: float = 30.0,
    *,
    settle: float = _SETTLE_TIME_S,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Starts a stack whose workers are containers, and measures on it."""
    with (
        _daemon() as (socket, image),
        running(
            pool_target=workers,
            launcher="docker",
            docker_socket=socket,
            docker_image=image,
            exchange_orders_per_10s=_ORDERS_PER_10S,
        ) as target,
    ):
        return measure(target, socket, image, workers, seconds, rate, settle=settle, say=say)


def measure(
    target: Target,
    socket: Path,
    image: str,
    workers: int,
    seconds: float,
    rate: float,
    *,
    settle: float,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Measures `workers` active workers,
    with `rate` orders a second in all, without and with the eater.

    Each part takes `seconds`. The eater runs on the daemon at `socket`.
    """
    users = target.make_users("dense", workers)
    target.wait_ready(workers)
    target.pool_update("pause")  # launches of new workers would run into the measurement
    _start_workers(target, users, say)
    say("measuring: density, memory and CPU at rest")
    time.sleep(settle)
    pids = list(target.worker_pids().values())
    sizes = [pss_mib(pid) for pid in pids]
    before = cpu_seconds(*pids)
    time.sleep(settle)
    rest = (cpu_seconds(*pids) - before) / settle * 100
    say("measuring: density, orders")
    quiet = _measure_orders(target, users, seconds, rate)
    say("measuring: density, orders while a container eats memory")
    before, alive = cpu_seconds(*pids), len(target.workers())
    with MemoryHog(socket, image) as eater:
        crowded = _measure_orders(target, users, seconds, rate)
    busy = (cpu_seconds(*pids) - before) / seconds * 100
    alive_after = len(target.workers())
    target.pool_update("resume")
    return {
        "workers": len(pids),
        "pss_mib_each": round(sum(sizes) / len(sizes), 1),
        "pss_mib_all": round(sum(sizes), 1),
        "cpu_percent_at_rest": round(rest, 1),
        "cpu_percent_trading": round(busy, 1),
        "rate": rate,
        "n": len(crowded),
        "order_p50_ms": figures.milliseconds(crowded, 50)["p50_ms"],
        "order_p99_ms": figures.milliseconds(crowded, 99)["p99_ms"],
        "quiet_p50_ms": figures.milliseconds(quiet, 50)["p50_ms"],
        "quiet_p99_ms": figures.milliseconds(quiet, 99)["p99_ms"],
        "eaters_killed": eater.killed,
        "workers_lost": alive - alive_after,
    }


def table(result: dict[str, Any]) -> None:
    figures.print_table(
        f"density: {result['workers']} active workers in containers",
        [
            ("memory, PSS of each (MiB)", str(result["pss_mib_each"])),
            ("memory, PSS of all (MiB)", str(result["pss_mib_all"])),
            ("CPU of all at rest (% of one core)", str(result["cpu_percent_at_rest"])),
            (f"CPU of all at {result['rate']} orders/s", str(result["cpu_percent_trading"])),
            ("orders, ms", f"p50 {result['quiet_p50_ms']}   p99 {result['quiet_p99_ms']}"),
            (
                "orders while a container eats memory, ms",
                f"p50 {result['order_p50_ms']}   p99 {result['order_p99_ms']}",
            ),
            ("killed by the kernel meanwhile", f"{result['eaters_killed']} such containers"),
            ("workers lost", str(result["workers_lost"])),
        ],
    )
