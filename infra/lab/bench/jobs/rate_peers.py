"""The peers of `berth bench jobs`, each in an interpreter that has its package:
`python -m infra.lab.bench.jobs.rate_peers ACT PEER URL WORKERS`.

`run` is a worker process; `produce` is a producer, which does what each line of standard input
says. The interpreter may have nothing of Berth, so this file imports the standard library and the
peer alone.

Each peer is configured as its documentation says for jobs that must not be lost, with a quiet log.
Where it leaves a choice, the quicker setting counts. RQ, huey and arq store results by default;
dramatiq and procrastinate do not, and are left so.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from importlib.metadata import version
from typing import Any

from infra.lab.bench.jobs.tasks import perform

QUEUE = "bench"
#: Jobs that a producer sends in one call, where the peer can do that.
MAX_JOBS_PER_CALL = 500


class RqRatePeer:
    """RQ's `Worker`, which forks for each job.

    Retries need a `Retry` with each job (python-rq.org/docs/exceptions). Without it, the job of a
    killed worker ends in the registry of failed jobs and is not run again. A worker takes one job
    at a time by a blocking pop, so there is no prefetch and no poll interval.
    """

    package = "rq"

    def __init__(self, url: str) -> None:
        from redis import Redis
        from rq import Queue, Retry

        self._connection = Redis.from_url(url)
        self._queue = Queue(QUEUE, connection=self._connection)
        self._retry = Retry(max=3)

    def fill(self, count: int, busy: float) -> None:
        jobs = [self._queue.prepare_data(perform, [busy], retry=self._retry) for _ in range(count)]
        for first in range(0, count, MAX_JOBS_PER_CALL):
            self._queue.enqueue_many(jobs[first : first + MAX_JOBS_PER_CALL])

    def enqueue(self, stamp: str) -> None:
        self._queue.enqueue(perform, 0.0, stamp, retry=self._retry)

    def left(self) -> int:
        return int(self._connection.llen(self._queue.key))

    def run(self, workers: int) -> None:
        from rq import Worker

        self._work(Worker)

    def _work(self, kind: Any) -> None:
        kind([self._queue], connection=self._connection).work(logging_level="WARNING")


class RqSimpleRatePeer(RqRatePeer):
    """RQ's `SimpleWorker`, which runs jobs in its own process."""

    def run(self, workers: int) -> None:
        from rq import SimpleWorker

        self._work(SimpleWorker)


class HueyRatePeer:
    """huey's consumer with processes as workers.

    A worker takes a job out of the list before it runs it and has no acknowledgement; retries
    (huey.readthedocs.io, "Retrying tasks that fail") are for exceptions. By default it waits for
    jobs with a blocking pop.
    """

    package = "huey"

    def __init__(self, url: str) -> None:
        from huey import RedisHuey

        self._huey = RedisHuey(QUEUE, url=url)
        self._task = self._huey.task()(perform)

    def fill(self, count: int, busy: float) -> None:
        for _ in range(count):
            self._task(busy)

    def enqueue(self, stamp: str) -> None:
        self._task(0.0, stamp)

    def left(self) -> int:
        return int(self._huey.pending_count())

    def run(self, workers: int) -> None:
        from huey.consumer import Consumer

        Consumer(self._huey, workers=workers, worker_type="process", periodic=False).run()


class DramatiqRatePeer:
    """Threads of one process.

    It acknowledges late: the broker has a message until it was processed
    (dramatiq.io/advanced.html, "Message Persistence"). Eight threads are the default of its command
    line, and two messages for each are the default of `dramatiq_queue_prefetch`. A worker polls,
    more and more rarely while its queue is empty; no option changes that.
    """

    package = "dramatiq"

    def __init__(self, url: str) -> None:
        import dramatiq
        from dramatiq.brokers.redis import RedisBroker

        self._broker = RedisBroker(url=url)
        dramatiq.set_broker(self._broker)
        self._actor = dramatiq.actor(perform, queue_name=QUEUE)

    def fill(self, count: int, busy: float) -> None:
        for _ in range(count):
            self._actor.send(busy)

    def enqueue(self, stamp: str) -> None:
        self._actor.send(0.0, stamp)

    def left(self) -> int:
        return int(self._broker.client.llen(f"dramatiq:{QUEUE}"))

    def run(self, workers: int) -> None:
        from dramatiq import Worker

        Worker(self._broker, queues={QUEUE}, worker_threads=8).start()
        threading.Event().wait()


async def perform_async(_context: Any, busy: float = 0.0, stamp: str = "") -> None:
    """Runs the job for arq, which runs coroutines."""
    perform(busy, stamp)


class ArqRatePeer:
    """Coroutines of one process.

    It acknowledges late: a job stays in the queue until it has succeeded or failed
    (arq-docs.helpmanual.io, "Usage"). Ten jobs at once are the default of `max_jobs`, and a worker
    reads a hundred ids in advance (`queue_read_limit`).
    """

    package = "arq"
    #: Seconds between two looks at the queue. The documentation names no other value than the
    #: default of 0.5, which bounds a worker's rate and lets a job wait 250 ms at the median.
    POLL_INTERVAL_S = 0.01

    def __init__(self, url: str) -> None:
        import asyncio

        from arq.connections import RedisSettings

        self._settings = RedisSettings.from_dsn(url)
        self._runner = asyncio.Runner()
        self._connections: Any = None

    def fill(self, count: int, busy: float) -> None:
        from asyncio import gather

        async def send() -> None:
            pool = await self._pool()
            for first in range(0, count, 50):
                jobs = range(min(50, count - first))
                await gather(*(pool.enqueue_job(perform_async.__name__, busy) for _ in jobs))

        self._runner.run(send())

    def enqueue(self, stamp: str) -> None:
        async def send() -> None:
            await (await self._pool()).enqueue_job(perform_async.__name__, 0.0, stamp)

        self._runner.run(send())

    def left(self) -> int:
        async def count() -> int:
            return int(await (await self._pool()).zcard(QUEUE))

        return self._runner.run(count())

    async def _pool(self) -> Any:
        from arq import create_pool

        if self._connections is None:
            self._connections = await create_pool(self._settings, default_queue_name=QUEUE)
        return self._connections

    def run(self, workers: int) -> None:
        from arq.worker import Worker

        Worker(
            functions=[perform_async],
            queue_name=QUEUE,
            redis_settings=self._settings,
            poll_delay=self.POLL_INTERVAL_S,
        ).run()


class ProcrastinateRatePeer:
    """Coroutines of one process, on PostgreSQL.

    The periodic task is that of its documentation ("Retry stalled jobs", in "Going to production"):
    without it, the jobs of a killed worker stay in the status `doing`. A worker takes a job when it
    is free for one and keeps it until its end. Notifications wake it (`listen_notify`, on by
    default); a job whose notification it misses waits for its next poll, 5 s by default.
    """

    package = "procrastinate"
    #: Jobs at once; the default is 1.
    MAX_CONCURRENT_JOBS = 10

    def __init__(self, url: str) -> None:
        from procrastinate import App, PsycopgConnector

        self._app = App(connector=PsycopgConnector(conninfo=url))
        self._opened: Any = None

        @self._app.task(name="perform", queue=QUEUE, retry=3)
        async def perform_in_loop(busy: float = 0.0, stamp: str = "") -> None:
            perform(busy, stamp)

        @self._app.periodic(cron="*/10 * * * *")
        @self._app.task(queueing_lock="retry_stalled_jobs", pass_context=True)
        async def retry_stalled_jobs(context: Any, timestamp: int) -> None:
            for job in await self._app.job_manager.get_stalled_jobs():
                await self._app.job_manager.retry_job(job)

        self._task = perform_in_loop

    def prepare(self) -> None:
        with self._app.open() as app:
            app.schema_manager.apply_schema()

    def fill(self, count: int, busy: float) -> None:
        """Enqueues jobs in an empty table: ended jobs stay in it."""
        self._query("TRUNCATE procrastinate_jobs, procrastinate_workers CASCADE")
        for first in range(0, count, MAX_JOBS_PER_CALL):
            self._task.batch_defer(*[{"busy": busy}] * min(MAX_JOBS_PER_CALL, count - first))

    def enqueue(self, stamp: str) -> None:
        self._open()
        self._task.defer(stamp=stamp)

    def left(self) -> int:
        condition = f"queue_name = '{QUEUE}' AND status = 'todo'"
        query = f"SELECT count(*) AS count FROM procrastinate_jobs WHERE {condition}"  # noqa: S608 - a constant
        return int(self._open().execute_query_one(query)["count"])

    def _query(self, query: str) -> None:
        self._open().execute_query(query)

    def _open(self) -> Any:
        """Returns the open connector of the producer."""
        if self._opened is None:
            self._opened = self._app.open()
        return self._opened.connector.get_sync_connector()

    def run(self, workers: int) -> None:
        self._app.run_worker(concurrency=self.MAX_CONCURRENT_JOBS)


PEERS: dict[str, Any] = {
    "rq": RqRatePeer,
    "rq_simple": RqSimpleRatePeer,
    "huey": HueyRatePeer,
    "dramatiq": DramatiqRatePeer,
    "arq": ArqRatePeer,
    "procrastinate": ProcrastinateRatePeer,
}


def produce(peer: Any) -> None:
    """Answers each line of standard input, `[act, argument…]`, with a line of JSON."""
    if hasattr(peer, "prepare"):
        peer.prepare()
    print(json.dumps(version(peer.package)), flush=True)
    for line in sys.stdin:
        act, *arguments = json.loads(line)
        began = time.monotonic()
        answer = getattr(peer, act)(*arguments)
        print(json.dumps(began if act == "enqueue" else answer), flush=True)


def main(act: str, name: str, url: str, workers: str) -> None:
    peer = PEERS[name](url)
    if act == "produce":
        produce(peer)
    else:
        peer.run(int(workers))


if __name__ == "__main__":
    # procrastinate wants its app in a module that is not `__main__`.
    from infra.lab.bench.jobs import rate_peers

    rate_peers.main(*sys.argv[1:])
