"""`python -m infra.node --socket PATH --state DIR`: keeps this host's workers until SIGTERM.

It never takes a worker down with it: after SIGTERM, SIGINT or a crash all workers run on, and the
next node on the same state folder adopts them. Only `stop_all` on the socket ends them. With
`--contained` SIGTERM ends them first: in a container the kernel would kill them with the node, in
the middle of their orders.
"""

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import sqlite3
import sys
from pathlib import Path

import structlog
from prometheus_client import Gauge

from infra.environment import forget_library_variables
from infra.log import configure_log
from infra.node.accounts import AccountsUnavailable, UserIds, find_user_ids
from infra.node.address import listen, take_lock
from infra.node.register import NodeRegister
from infra.node.server import NodeServer
from infra.node.supervisor import NodeSupervisor
from infra.process_metrics import serving_metrics
from infra.processes import forbid_core_files
from worker_runtime.process.cgroup import LimitsUnavailable, MemoryGroups, find_groups
from worker_runtime.protocol.errors import BerthError

NODE_WORKERS = Gauge("berth_node_workers", "Workers that run on this host.")

_log = structlog.get_logger()

#: As in `infra.settings`; a test compares them.
NODE_UIDS = "60707-61183"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="berth node", description="Keeps this host's workers until SIGTERM."
    )
    data = Path(os.environ.get("BERTH_DATA_DIR", ".berth"))
    socket_path = Path(os.environ.get("BERTH_NODE_SOCKET", data / "node.sock"))
    parser.add_argument("--socket", type=Path, default=socket_path, help="Unix socket to serve")
    parser.add_argument(
        "--state", type=Path, default=data / "node", help="folder of register and logs"
    )
    parser.add_argument(
        "--cgroup", type=Path, help="memory cgroup delegated to the node (default: its own)"
    )
    parser.add_argument(
        "--contained",
        action="store_true",
        help="for a node in a container: starts only with memory limits; SIGTERM ends its "
        "workers first",
    )
    parser.add_argument(
        "--command",
        type=shlex.split,
        default=[sys.executable, "-P", "-m", "worker_runtime"],
        help="what to start as a worker; worker and task id are added (default: python -m "
        "worker_runtime)",
    )
    parser.add_argument(
        "--uids",
        default=os.environ.get("BERTH_NODE_UIDS", NODE_UIDS),
        help="FIRST-LAST: under root each worker runs under a user id of its own from this range",
    )
    parser.add_argument(
        "--metrics",
        default=os.environ.get("BERTH_METRICS_ADDRESS", ""),
        help="HOST:PORT on which to show metrics to Prometheus",
    )
    parser.add_argument("--log-level", default=os.environ.get("BERTH_LOG_LEVEL", "INFO"))
    return parser.parse_args()


def _limits(register: NodeRegister, parent: Path | None, *, required: bool) -> MemoryGroups | None:
    """Raises `LimitsUnavailable` where limits are required."""
    try:
        return find_groups(f"berth-{register.log}", parent)
    except LimitsUnavailable as error:
        if required:
            raise
        _log.warning("node.no_memory_limits", detail=error.detail)
        return None


def _user_ids(options: argparse.Namespace) -> UserIds | None:
    try:
        return find_user_ids(options.uids, options.state, options.state / "run")
    except AccountsUnavailable as error:
        _log.warning(
            "node.workers_share_user",
            detail=error.detail,
            means="a worker that was taken over can read the files of the node's user and end "
            "other workers",
        )
        return None


async def _serve(options: argparse.Namespace) -> None:
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    async with contextlib.AsyncExitStack() as closing:
        register = NodeRegister(options.state / "register.db")
        closing.callback(register.close)
        listening = listen(options.socket)
        closing.callback(options.socket.unlink, missing_ok=True)
        closing.callback(listening.close)
        groups = _limits(register, options.cgroup, required=options.contained)
        if groups is not None:
            closing.callback(groups.close)
        supervisor = NodeSupervisor(
            options.state, register, groups, options.command, _user_ids(options)
        )
        closing.push_async_callback(supervisor.close)
        supervisor.adopt()
        NODE_WORKERS.set_function(lambda: len(supervisor.tasks()))
        closing.enter_context(serving_metrics(options.metrics))
        limits = f"cgroup v{groups.version}" if groups else "none"
        server = NodeServer(supervisor, register, limits=limits)
        closing.push_async_callback(server.close)
        await server.start(listening)
        sweeping = loop.create_task(supervisor.sweep_logs())
        closing.callback(sweeping.cancel)
        _log.info(
            "node.ready",
            socket=str(options.socket),
            state=str(options.state),
            limits=limits,
            workers=len(supervisor.tasks()),
        )
        await ending.wait()
        if options.contained:
            await server.close()  # nothing is launched any more
            await supervisor.stop_all("the node's container stops")
        remaining = len(supervisor.tasks())
    _log.info("node.stopped", workers_left=remaining)


def main() -> int:
    forbid_core_files()
    forget_library_variables()
    options = _options()
    configure_log(options.log_level)
    os.umask(0o077)  # register and logs are this user's only
    try:
        # One node a state folder and a socket: the kernel drops these locks with the process.
        with (
            take_lock(options.state / "lock"),
            take_lock(options.socket.with_name(f"{options.socket.name}.lock")),
        ):
            asyncio.run(_serve(options))
    except BerthError as error:
        _log.error("node.failed", code=error.code, detail=error.detail)
        return 1
    except (OSError, sqlite3.Error) as error:
        _log.error("node.failed", code="NODE_STATE_UNREADABLE", detail=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
