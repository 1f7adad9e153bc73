"""Health checks for containers: `python -m infra.compose.health CHECK TARGET`; exit 0 means
healthy.

- `http URL`: answers with 200.
- `tcp HOST:PORT`, `unix PATH`: accepts a connection.
- `poller QUEUE`: Temporal lists a poller of this host on the task queue. A process may live and not
  poll, which only the server knows. While that does not answer: this orchestrator has served
  before.
- `runner NAME`: a job runner of this name on this host has renewed its lease recently.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
import time
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from worker_runtime.protocol.errors import BerthError

if TYPE_CHECKING:
    from infra.settings import Settings

#: Seconds for one check; the `timeout` in `compose.yaml` is longer.
TIMEOUT = 4.0


def http(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ValueError("no http URL")
    # Plain: no proxy from the environment, and no redirect.
    with contextlib.closing(
        HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT)
    ) as connection:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == 200


def tcp(target: str) -> bool:
    host, _, port = target.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT):
        return True


def unix(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(TIMEOUT)
        link.connect(path)
        return True


async def is_polling(settings: Settings, queue: str, host: str) -> bool:
    """Whether a worker of `host` has polled `queue` for workflow tasks recently. Raises
    `BerthError`."""
    from temporalio.api.enums.v1 import TaskQueueType

    from infra.temporal.client import MAX_POLL_AGE_S, read_pollers, temporal_errors
    from infra.temporal.connection import open_client

    client = await asyncio.wait_for(open_client(settings), TIMEOUT)
    workflows = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
    with temporal_errors():
        pollers = await asyncio.wait_for(read_pollers(client, queue, workflows), TIMEOUT)
    since = time.time() - MAX_POLL_AGE_S
    return any(name.endswith(f"@{host}") and at > since for name, at in pollers.items())


def poller(queue: str) -> bool:
    from infra.settings import Settings

    settings = Settings()
    try:
        return asyncio.run(is_polling(settings, queue, socket.gethostname()))
    except (BerthError, TimeoutError):
        # ECS would replace it by one that waits for Temporal, and orders' events would wait with
        # it.
        return (settings.data_dir / f"{settings.orchestrator_name}.ready").exists()


def is_registered(url: str, name: str, host: str, within: float, tag: str = "jobs") -> bool:
    """Whether a job runner of `host` was seen in the last `within` seconds, by Valkey's clock.

    `tag`: of the jobs that it runs, the fleet's or an application's.
    """
    from redis import Redis
    from redis.exceptions import RedisError

    from infra.valkey.failures import explain_failure
    from worker_runtime.jobs.protocol import keys as job_keys

    client: Any = Redis.from_url(url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT)
    try:
        now, ids = client.time()[0], client.hkeys(job_keys.beats(tag))
        entries = [job_keys.runner(tag, runner_id.decode()) for runner_id in ids]
        runners = [client.hmget(entry, ["name", "node", "seen_at"]) for entry in entries]
    except RedisError as error:
        raise RuntimeError(explain_failure(error)) from None
    finally:
        client.close()
    lately = [runner[:2] for runner in runners if now - int(runner[2] or 0) / 1000 < within]
    return [name.encode(), host.encode()] in lately


def runner(name: str) -> bool:
    from infra.jobs.fleet import fleet_tag, with_own_login
    from infra.settings import Settings

    settings = with_own_login(Settings())
    # It renews three times in a lease; on a busy machine less often.
    within = 2 * settings.jobs_lease + TIMEOUT
    return is_registered(
        settings.valkey_url, name, socket.gethostname(), within, fleet_tag(settings)
    )


CHECKS = {"http": http, "tcp": tcp, "unix": unix, "poller": poller, "runner": runner}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.compose.health", description=__doc__)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("target")
    chosen = parser.parse_args(arguments)
    try:
        healthy = CHECKS[chosen.check](chosen.target)
    except (OSError, HTTPException, RuntimeError, ValueError, BerthError) as error:
        sys.stderr.write(f"{chosen.check} {chosen.target}: {error}\n")
        return 1
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
