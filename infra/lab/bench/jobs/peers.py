"""One process of a peer: `python -m infra.lab.bench.jobs.peers worker|simple|huey URL WORKERS`.

Each is started as its documentation says, with results on and a quiet log.
"""

from __future__ import annotations

import sys
from typing import Any

from redis import Redis

from infra.lab.bench.jobs import tasks

#: Name of the peers' queue.
QUEUE = "bench"


def huey_task(url: str) -> tuple[Any, Any]:
    """huey, and our job as its task."""
    from huey import RedisHuey

    huey = RedisHuey(QUEUE, url=url)
    return huey, huey.task()(tasks.perform)


def _rq(kind: str, url: str) -> None:
    from rq import Queue, SimpleWorker, Worker

    connection = Redis.from_url(url)
    worker = {"worker": Worker, "simple": SimpleWorker}[kind]
    queue = Queue(QUEUE, connection=connection)
    worker([queue], connection=connection).work(logging_level="WARNING")


def _huey(url: str, workers: int) -> None:
    from huey.consumer import Consumer

    huey, _ = huey_task(url)
    Consumer(huey, workers=workers, worker_type="process", periodic=False).run()


if __name__ == "__main__":
    if sys.argv[1] == "huey":
        _huey(sys.argv[2], int(sys.argv[3]))
    else:
        _rq(sys.argv[1], sys.argv[2])
