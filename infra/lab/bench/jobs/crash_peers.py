"""The peers of the crash matrix: `python -m infra.lab.bench.jobs.crash_peers ACT KIND URL …`.

It runs in an interpreter that has the peers' packages (`peer_environment.PACKAGES`) and nothing of
Berth, so it imports the standard library and the peer alone. Each peer is configured as its
documentation says for jobs that must not be lost: retries, and late acknowledgement where it has
one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import Any

from infra.lab.bench.jobs.tasks import MAX_CONCURRENT_JOBS

QUEUE = "bench"
#: Runs of a job at most.
MAX_ATTEMPTS = 4
#: Seconds that a job may take.
JOB_TIMEOUT_S = 20


def work(ledger: str, number: int, seconds: float) -> None:
    """Runs the job: writes a line at its start and one at its end."""
    _note(ledger, f"start {number}")
    time.sleep(seconds)
    _note(ledger, f"end {number}")


async def work_async(_context: Any, ledger: str, number: int, seconds: float) -> None:
    """Runs the job for arq."""
    _note(ledger, f"start {number}")
    await asyncio.sleep(seconds)
    _note(ledger, f"end {number}")


def _note(ledger: str, event: str) -> None:
    """Writes once to a file that is open for appending: lines of several processes do not mix."""
    descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        line = f"{event} {os.getpid()} {os.getppid()} {time.monotonic():.3f}\n"
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


class Rq:
    """A fork for each job; abandoned jobs are found by the worker's maintenance."""

    def __init__(self, url: str) -> None:
        from redis import Redis
        from rq import Queue

        self._connection = Redis.from_url(url)
        self._queue = Queue(QUEUE, connection=self._connection)

    def enqueue(self, *arguments: Any) -> None:
        from rq import Retry

        retry = Retry(max=MAX_ATTEMPTS - 1)
        self._queue.enqueue(work, *arguments, retry=retry, job_timeout=JOB_TIMEOUT_S)

    def run(self) -> None:
        from rq import Worker

        Worker([self._queue], connection=self._connection).work(logging_level="WARNING")


class Huey:
    """Processes; it has no acknowledgement."""

    def __init__(self, url: str) -> None:
        from huey import RedisHuey

        self._huey = RedisHuey(QUEUE, url=url)
        self._task = self._huey.task(retries=MAX_ATTEMPTS - 1)(work)

    def enqueue(self, *arguments: Any) -> None:
        self._task(*arguments)

    def run(self) -> None:
        from huey.consumer import Consumer

        Consumer(
            self._huey, workers=MAX_CONCURRENT_JOBS, worker_type="process", periodic=False
        ).run()


class Dramatiq:
    """Threads of one process; messages of dead workers are requeued after a minute."""

    def __init__(self, url: str) -> None:
        import dramatiq
        from dramatiq.brokers.redis import RedisBroker

        self._broker = RedisBroker(url=url)
        dramatiq.set_broker(self._broker)
        limits = {"max_retries": MAX_ATTEMPTS - 1, "time_limit": JOB_TIMEOUT_S * 1000}
        self._actor = dramatiq.actor(work, queue_name=QUEUE, **limits)

    def enqueue(self, *arguments: Any) -> None:
        self._actor.send(*arguments)

    def run(self) -> None:
        from dramatiq import Worker

        Worker(self._broker, queues={QUEUE}, worker_threads=MAX_CONCURRENT_JOBS).start()
        threading.Event().wait()


class Arq:
    """Coroutines of one process; a job in progress is locked for its timeout."""

    def __init__(self, url: str) -> None:
        from arq.connections import RedisSettings

        self._settings = RedisSettings.from_dsn(url)

    def enqueue(self, *arguments: Any) -> None:
        from arq import create_pool

        async def send() -> None:
            pool = await create_pool(self._settings)
            await pool.enqueue_job("work_async", *arguments, _queue_name=QUEUE)
            await pool.aclose()

        asyncio.run(send())

    def run(self) -> None:
        from arq.worker import Worker

        Worker(
            functions=[work_async],
            queue_name=QUEUE,
            redis_settings=self._settings,
            max_jobs=MAX_CONCURRENT_JOBS,
            max_tries=MAX_ATTEMPTS,
            job_timeout=JOB_TIMEOUT_S,
            poll_delay=0.05,
        ).run()


class Procrastinate:
    """Threads of one process, on PostgreSQL; a periodic task retries stalled jobs each minute."""

    def __init__(self, url: str) -> None:
        from procrastinate import App, PsycopgConnector

        self._app = App(connector=PsycopgConnector(conninfo=url))
        self._task = self._app.task(name="work", queue=QUEUE, retry=MAX_ATTEMPTS - 1)(work)

        @self._app.periodic(cron="* * * * *")
        @self._app.task(name="retry_stalled", queue=QUEUE, pass_context=True)
        async def retry_stalled(context: Any, timestamp: int) -> None:
            stalled = await self._app.job_manager.get_stalled_jobs()
            for job in stalled:
                await self._app.job_manager.retry_job(job)

    def prepare(self) -> None:
        with self._app.open() as app:
            app.schema_manager.apply_schema()

    def enqueue(self, *arguments: Any) -> None:
        ledger, number, seconds = arguments
        with self._app.open():
            self._task.defer(ledger=ledger, number=number, seconds=seconds)

    def run(self) -> None:
        self._app.run_worker(queues=[QUEUE], concurrency=MAX_CONCURRENT_JOBS)


KINDS: dict[str, Any] = {
    "rq": Rq,
    "huey": Huey,
    "dramatiq": Dramatiq,
    "arq": Arq,
    "procrastinate": Procrastinate,
}


def main(act: str, kind: str, url: str, *arguments: str) -> None:
    peer = KINDS[kind](url)
    if act == "run":
        peer.run()
    elif act == "prepare":
        if hasattr(peer, "prepare"):
            peer.prepare()
    else:
        ledger, first, count, seconds = arguments
        for number in range(int(first), int(first) + int(count)):
            peer.enqueue(ledger, number, float(seconds))


if __name__ == "__main__":
    # Workers look for the job by its module, which must not be `__main__`.
    from infra.lab.bench.jobs import crash_peers

    crash_peers.main(*sys.argv[1:])
