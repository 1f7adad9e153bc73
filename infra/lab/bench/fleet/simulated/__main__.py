"""`python -m infra.lab.bench.fleet.simulated`: serves the node's socket until SIGTERM; its workers
end with it.

Settings: BERTH_NODE_SOCKET, BERTH_VALKEY_URL, BERTH_LOG_LEVEL.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import signal
import sys

import structlog

from infra.lab.bench.fleet.simulated.calls import SimulatedConnections
from infra.lab.bench.fleet.simulated.supervisor import SimulatedSupervisor
from infra.lab.bench.fleet.simulated.worker import SimulatedBehaviour
from infra.log import configure_log
from infra.node.address import listen
from infra.node.server import NodeServer
from infra.settings import Settings
from worker_runtime.protocol.errors import BerthError

log = structlog.get_logger()


def _behaviour() -> SimulatedBehaviour:
    parser = argparse.ArgumentParser(prog="infra.lab.bench.fleet.simulated")
    usual = SimulatedBehaviour()
    parser.add_argument(
        "--start", type=float, default=usual.start, help="seconds from launch to ready"
    )
    parser.add_argument(
        "--connect", type=float, default=usual.connect, help="seconds of a broker login"
    )
    parser.add_argument("--used", action="store_true", help="their users are active all the time")
    parser.add_argument(
        "--own-login", action="store_true", help="each has a connection by its own name"
    )
    return SimulatedBehaviour(**vars(parser.parse_args()))


async def _serve(settings: Settings, habits: SimulatedBehaviour) -> None:
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    link = SimulatedConnections(settings.valkey_url)
    supervisor = SimulatedSupervisor(link, habits)
    server = NodeServer(supervisor, supervisor, limits="none")
    await server.start(listen(settings.node_socket))
    log.info("simulated.ready", socket=str(settings.node_socket))
    await ending.wait()
    await server.close()
    await supervisor.close()
    await link.close()
    settings.node_socket.unlink(missing_ok=True)


def main() -> int:
    settings, habits = Settings(), _behaviour()
    configure_log(settings.log_level)
    # One connection a worker: the usual soft limit
    # of 1,024 descriptors would end at a thousand of them.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    try:
        asyncio.run(_serve(settings, habits))
    except BerthError as error:
        log.error("simulated.failed", code=error.code, detail=error.detail)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
