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

import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

# Nothing else is imported here: a dozen containers start this program every few seconds, and what
# only some checks need costs the others more than their own work.
if TYPE_CHECKING:
    from infra.settings import Settings

#: Seconds for one check; the `timeout` in `compose.yaml` is longer.
CHECK_TIMEOUT_S = 4.0
#: Seconds after which a check ends itself. Docker counts one that takes longer as failed and leaves
#: it running: on a machine without time to spare they would become more and more.
MAX_LIFE_S = 8


def http(url: str) -> bool:
    scheme, _, rest = url.partition("://")
    address, _, path = rest.partition("/")
    host, _, port = address.partition(":")
    if scheme != "http" or not host:
        raise ValueError("no http URL")
    # Plain: no proxy from the environment, and no redirect.
    with socket.create_connection((host, int(port or 80)), timeout=CHECK_TIMEOUT_S) as link:
        request = f"GET /{path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
        link.sendall(request.encode("ascii"))
        with link.makefile("rb") as answer:
            words = answer.readline(1024).split(maxsplit=2)
    return len(words) >= 2 and words[0].startswith(b"HTTP/1.") and words[1] == b"200"


def tcp(target: str) -> bool:
    host, _, port = target.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=CHECK_TIMEOUT_S):
        return True


def unix(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(CHECK_TIMEOUT_S)
        link.connect(path)
        return True


async def is_polling(settings: Settings, queue: str, host: str) -> bool:
    """Returns True if a worker of `host` has polled `queue` for workflow tasks recently. Raises
    `BerthError`."""
    import asyncio
    import time

    from temporalio.api.enums.v1 import TaskQueueType

    from infra.temporal.client import MAX_POLL_AGE_S, read_pollers, temporal_errors
    from infra.temporal.connection import open_client

    client = await asyncio.wait_for(open_client(settings), CHECK_TIMEOUT_S)
    workflows = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
    with temporal_errors():
        pollers = await asyncio.wait_for(read_pollers(client, queue, workflows), CHECK_TIMEOUT_S)
    since = time.time() - MAX_POLL_AGE_S
    return any(name.endswith(f"@{host}") and at > since for name, at in pollers.items())


def poller(queue: str) -> bool:
    import asyncio

    from infra.settings import Settings
    from worker_runtime.protocol.errors import BerthError

    settings = Settings()
    try:
        return asyncio.run(is_polling(settings, queue, socket.gethostname()))
    except (BerthError, TimeoutError):
        # ECS would replace it by one that waits for Temporal, and orders' events would wait with
        # it.
        return (settings.data_dir / f"{settings.orchestrator_name}.ready").exists()


def is_registered(url: str, name: str, host: str, within: float, tag: str = "jobs") -> bool:
    """Returns True if a job runner of `host` was seen in the last `within` seconds, by Valkey's
    clock.

    `tag`: of the jobs that it runs, the fleet's or an application's.
    """
    from redis import Redis
    from redis.exceptions import RedisError

    from infra.valkey.failures import explain_failure
    from worker_runtime.jobs.protocol import keys as job_keys

    client: Any = Redis.from_url(
        url, socket_timeout=CHECK_TIMEOUT_S, socket_connect_timeout=CHECK_TIMEOUT_S
    )
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
    within = 2 * settings.jobs_lease + CHECK_TIMEOUT_S
    return is_registered(
        settings.valkey_url, name, socket.gethostname(), within, fleet_tag(settings)
    )


CHECKS = {"http": http, "tcp": tcp, "unix": unix, "poller": poller, "runner": runner}


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in CHECKS:
        sys.stderr.write(f"usage: python -m infra.compose.health {'|'.join(CHECKS)} TARGET\n")
        return 2
    check, target = arguments
    try:
        return 0 if CHECKS[check](target) else 1
    except Exception as error:  # the boundary of the process: whatever fails is not healthy
        sys.stderr.write(f"{check} {target}: {error}\n")
        return 1


if __name__ == "__main__":
    signal.alarm(MAX_LIFE_S)
    sys.exit(main(sys.argv[1:]))
