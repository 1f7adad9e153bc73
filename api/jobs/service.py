"""Enqueues, shows and cancels jobs; reads the orders that a job needs from the database."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import structlog

from api.http.errors import InvalidRequest, NotFound, TooManyJobs
from api.jobs import schemas
from api.orders.export import row_of
from api.orders.outcomes import view_of
from infra.database import accounts
from infra.database.engine import Database
from infra.database.orders import listing as order_list
from infra.jobs.client import JobClient, JobState
from infra.market.calendar import TAIPEI
from infra.temporal.starter import WorkerStarter
from infra.valkey.request_queue import RequestQueue
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import JobStatus
from worker_runtime.protocol.errors import MalformedMessage

log = structlog.get_logger()

#: Orders that are read for one job: more do not fit into it, however well they are packed.
_MOST_ORDERS = 2000
#: Jobs that a user may ask for while a result is kept (500 s). A result has up to 64 KiB and stands in the
#: Valkey that holds the leases: so this is what one key can put there, however quick its jobs are.
_MOST_LATELY = 50
_USERS = (catalog.STATEMENT, catalog.EXPORT, catalog.SNAPSHOT)
_FLEET_WORK: dict[str, type[msgspec.Struct]] = {
    "ping": catalog.PingRunner,
    "email": catalog.SendEmail,
    "webhook": catalog.DeliverWebhook,
}


@dataclass(frozen=True, eq=False)
class JobService:
    """Every method raises `RedisError` when Valkey is down."""

    database: Database
    queue: RequestQueue
    jobs: JobClient
    starter: WorkerStarter
    #: Jobs of one user that may wait at a time.
    limit: int

    async def enqueue_user_job(self, user_id: str, wanted: schemas.UserJob) -> schemas.JobStateView:
        """Enqueues a job on the user's own queue, and starts the worker that runs it if there is none.

        Raises `TooManyJobs`, `TooManyOrders`, `UnknownAccount`, `JobIdReused`, `DatabaseUnavailable`.
        """
        tag = job_keys.user_tag(user_id)
        known = wanted.job_id is not None and await self.jobs.get(wanted.job_id, tag=tag) is not None
        if not known:
            await self._check_room(tag)
        work = await self._work(user_id, wanted)
        state = await self._put(wanted, work, tag, wanted.job_id or str(uuid4()))
        if not state.ended and not await self.queue.marked(user_id):
            self.starter.ensure(user_id, mark_missing=True).add_done_callback(self._started)
        return view(state)

    async def enqueue_fleet_job(self, wanted: schemas.FleetJobRequest, job_id: str) -> schemas.JobStateView:
        """Enqueues a job of the fleet; `job_id`: the caller's, or one made for it. Raises `InvalidRequest`,
        `JobIdReused`."""
        job = wanted.job
        fields = job.model_dump(exclude={"job_id", "type"})
        options: dict[str, Any] = {"priority": wanted.priority, "delay": wanted.delay}
        if isinstance(job, schemas.WebhookJobRequest):
            body = json.dumps(job.body, separators=(",", ":"), allow_nan=False)
            fields["body"] = msgspec.Raw(body.encode())
            options["rate_key"] = _host(job.url)
        work = _FLEET_WORK[job.type](**fields)
        return view(await self._put(job, work, job_keys.FLEET_TAG, job_id, **options))

    async def get_job(self, job_id: str, tag: str, seconds: float = 0.0) -> schemas.JobStateView:
        """The job, once it has ended or `seconds` have passed. Raises `NotFound`."""
        return view(_found_or_404(await self.jobs.wait(job_id, seconds, tag=tag)))

    async def cancel(self, job_id: str, tag: str) -> schemas.JobStateView:
        """The job as it stands after the cancel; one that has ended stays as it is. Raises `NotFound`."""
        await self.jobs.cancel(job_id, tag=tag)
        return await self.get_job(job_id, tag)

    async def file(self, job_id: str, tag: str) -> bytes:
        """The CSV of an export that is done. Raises `NotFound` if there is none (any more)."""
        state = _found_or_404(await self.jobs.get(job_id, tag=tag))
        if state.result is None or state.result.status is not JobStatus.DONE:
            raise NotFound
        try:
            export = msgspec.json.decode(state.result.value, type=catalog.OrderExport)
        except msgspec.DecodeError:
            raise NotFound from None
        return catalog.unpack_csv(export)

    async def _put(
        self, wanted: Any, work: msgspec.Struct, tag: str, job_id: str, **options: Any
    ) -> JobState:
        digest = ""
        if wanted.job_id is not None:
            text = json.dumps([wanted.asked(), options], sort_keys=True)
            digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        try:
            await self.jobs.enqueue(catalog.make_job(job_id, work, **options), tag=tag, digest=digest)
        except MalformedMessage as error:
            raise InvalidRequest(error.detail) from None
        found = await self.jobs.get(job_id, tag=tag)
        return found or JobState(job_id, "waiting", catalog.JOB_KINDS[type(work)].name)

    async def _check_room(self, tag: str) -> None:
        # The count first: calls that come at once see each other in it, though not among the waiting jobs.
        if await self.jobs.count_request(tag=tag) > _MOST_LATELY:
            raise TooManyJobs
        subqueues = [(kind.queue, kind.name) for kind in _USERS]
        if await self.jobs.count_waiting(subqueues, tag=tag) >= self.limit:
            raise TooManyJobs

    async def _work(self, user_id: str, wanted: schemas.UserJob) -> msgspec.Struct:
        if isinstance(wanted, schemas.SnapshotJobRequest):
            async with self.database.session() as session:
                await accounts.require_account(session, user_id, wanted.account_id)
            return catalog.SnapshotPositions(user_id=user_id, account_id=wanted.account_id)
        if isinstance(wanted, schemas.ExportJobRequest):
            packed = await self._packed(wanted.orders.of(user_id))
            return catalog.ExportOrders(user_id=user_id, orders=packed)
        packed = await self._packed(_of_day(user_id, wanted.day))
        return catalog.MakeStatement(user_id=user_id, day=wanted.day.isoformat(), orders=packed)

    async def _packed(self, wanted: order_list.OrderSelection) -> bytes:
        async with self.database.session() as session:
            rows = await order_list.page_of_orders(session, wanted, limit=_MOST_ORDERS + 1)
        if len(rows) > _MOST_ORDERS:
            raise catalog.TooManyOrders(f"more than {_MOST_ORDERS} orders")
        found = [row_of(view_of(row)) for row in rows]
        return await asyncio.to_thread(catalog.pack_orders, found)  # some ms of compression

    def _started(self, task: asyncio.Task[Any]) -> None:
        """Logs why no worker was started. The job waits all the same."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.warning("job_waits_for_worker", reason=str(error))


def view(state: JobState) -> schemas.JobStateView:
    result = state.result
    failure = result.failure if result else None
    return schemas.JobStateView(
        id=state.job_id,
        type=state.name,
        state=state.state,
        ended=state.ended,
        cancelling=state.cancelling,
        attempt=state.attempt,
        queued_at=schemas.time_of_ms(state.queued_at_ms),
        due_at=schemas.time_of_ms(state.due_at_ms),
        started_at=schemas.time_of_ms(state.started_at_ms),
        finished_at=schemas.time_of_ms(result.finished_at_ms) if result and state.ended else None,
        progress=state.progress,
        value=msgspec.json.decode(result.value) if result and state.ended else None,
        failure=schemas.JobFailureView.model_validate(failure) if failure else None,
    )


def _host(url: str) -> str:
    """What a rate of webhooks (a setting of the queue) holds for: each receiver. Raises `InvalidRequest`."""
    try:
        return (urlsplit(url).hostname or "-")[:128]
    except ValueError:
        raise InvalidRequest("url: it cannot be read") from None


def _found_or_404(state: JobState | None) -> JobState:
    if state is None:
        raise NotFound
    return state


def _of_day(user_id: str, day: date) -> order_list.OrderSelection:
    begin = datetime.combine(day, time(), TAIPEI)
    return order_list.OrderSelection(user_id=user_id, since=begin, until=begin + timedelta(days=1))
