"""Enqueues, shows and cancels jobs; reads the orders that a job needs from the database."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import structlog
from redis.exceptions import RedisError

from api.http.errors import InvalidRequest, NotFound, TooManyJobs
from api.jobs import schemas
from api.orders.export import row_of
from api.orders.outcomes import view_of
from infra.database import accounts
from infra.database.engine import Database
from infra.database.orders import listing as order_list
from infra.jobs.client import JobState
from infra.jobs.kept import KeptJobs
from infra.market.calendar import HOME_ZONE
from infra.temporal.starter import WorkerStarter
from infra.valkey.request_queue import RequestQueue
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import JobStatus
from worker_runtime.protocol.errors import MalformedMessage

log = structlog.get_logger()

#: Orders that are read for one job: no more fit into it, however well they are packed.
_MAX_ORDERS_PER_JOB = 2000
#: Jobs that a user may ask for within 500 s, the time for which a result is kept. A result has up
#: to 64 KiB and is in the Valkey that holds the leases, so this bounds what one user's results take
#: there, however quick the jobs are.
_MAX_RECENT_REQUESTS = 50
_USER_JOB_KINDS = [
    catalog.JOB_KINDS[work]
    for work in (catalog.MakeStatement, catalog.ExportOrders, catalog.SnapshotPositions)
]
_FLEET_ARGUMENTS = {kind.name: work for work, kind in catalog.JOB_KINDS.items()}


@dataclass(frozen=True, eq=False)
class JobService:
    """Methods that read Valkey raise `RedisError` while it is down. `enqueue_fleet_job` accepts a
    job without it."""

    database: Database
    queue: RequestQueue
    kept: KeptJobs
    starter: WorkerStarter
    #: Jobs of one user that may wait at a time.
    limit: int

    async def enqueue_user_job(
        self,
        user_id: str,
        request: schemas.UserJob,
        before_enqueue: Callable[[], Awaitable[None]],
        *,
        priority: int = 5,
        group: str = "",
    ) -> schemas.JobStateView:
        """Enqueues a job on the user's own queue, and starts the worker that runs it if there is
        none.

        `priority`: 0 to 9, among the jobs of this user. `group`: jobs of one group run one after
        the other.
        `before_enqueue` is awaited once, when there is room for a new job: it writes the caller's
        audit entry.
        Raises `TooManyJobs`, `TooManyOrders`, `AccountNotFound`, `JobIdReused`,
        `DatabaseUnavailable`.
        """
        tag = job_keys.user_tag(user_id)
        known = request.job_id is not None and await self._find(request.job_id, user_id) is not None
        if not known:
            await self._check_room(tag)
            # Those that wait for others of their group are not among the waiting ones.
            if group and await self.kept.count_open(user_id) >= self.limit:
                raise TooManyJobs
        work = await self._work(user_id, request)
        if not known:
            await before_enqueue()
        # Defaults are left out, so that a repeat of a call of 0.1.0 is recognised.
        options: dict[str, Any] = {} if priority == 5 else {"priority": priority}
        if group:
            options["group"] = group
        state = await self._put(request, work, user_id, request.job_id or str(uuid4()), **options)
        if not state.ended and not await self.queue.has_live_worker(user_id):
            self.starter.ensure(user_id, check_worker=True).add_done_callback(self._started)
        return view(state)

    async def enqueue_fleet_job(
        self, request: schemas.FleetJobRequest, job_id: str
    ) -> schemas.JobStateView:
        """Enqueues a job of the fleet; `job_id`: the caller's, or one made for it. Raises
        `InvalidRequest`, `JobIdReused`."""
        job = request.job
        fields = job.model_dump(exclude={"job_id", "type"})
        options: dict[str, Any] = {"priority": request.priority, "delay": request.delay}
        if isinstance(job, schemas.WebhookJobRequest):
            body = json.dumps(job.body, separators=(",", ":"), allow_nan=False)
            fields["body"] = msgspec.Raw(body.encode())
            options["rate_key"] = str(urlsplit(job.url).hostname)[:128]  # each receiver has a rate
        elif isinstance(job, schemas.MESSAGES):
            options["rate_key"] = job.type  # one sender has one rate
        try:
            work = _FLEET_ARGUMENTS[job.type](**fields)
        except ValueError as error:
            raise InvalidRequest(f"{job.type}: {error}") from None
        return view(await self._put(job, work, "", job_id, **options))

    async def get_job(
        self, job_id: str, user_id: str = "", seconds: float = 0.0
    ) -> schemas.JobStateView:
        """Returns the job, once it has ended or `seconds` have passed. Raises `NotFound`."""
        if (state := await self._find(job_id, user_id, seconds)) is None:
            raise NotFound
        return view(state)

    async def cancel(self, job_id: str, user_id: str = "") -> schemas.JobStateView:
        """Cancels a job and returns it as it stands then; one that has ended stays as it is. Raises
        `NotFound`."""
        tag = job_keys.tag_of(user_id)
        lost = await self.kept.queue.get(job_id, tag=tag) is None
        if lost and await self.kept.end(job_id, user_id, "cancelled"):
            return view(JobState(job_id, "cancelled"))
        await self.kept.queue.cancel(job_id, tag=tag)
        return await self.get_job(job_id, user_id)

    async def _find(self, job_id: str, user_id: str, seconds: float = 0.0) -> JobState | None:
        queued = await self.kept.queue.wait(job_id, seconds, tag=job_keys.tag_of(user_id))
        return queued or await self.kept.get(job_id, user_id)

    async def file(self, job_id: str, user_id: str) -> bytes:
        """Returns the CSV of an export that is done. Raises `NotFound` if there is none (any
        more)."""
        state = await self._find(job_id, user_id)
        if state is None or state.result is None or state.result.status is not JobStatus.DONE:
            raise NotFound
        try:
            export = msgspec.json.decode(state.result.value, type=catalog.OrderExport)
        except msgspec.DecodeError:
            raise NotFound from None
        return catalog.decompress(export.csv)

    async def _put(
        self, request: Any, work: msgspec.Struct, user_id: str, job_id: str, **options: Any
    ) -> JobState:
        digest = ""
        if request.job_id is not None:
            asked = request.model_dump(mode="json", exclude={"job_id"})
            text = json.dumps([asked, options], sort_keys=True)
            digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        try:
            job = catalog.make_job(job_id, work, **options)
            await self.kept.enqueue(job, user_id=user_id, digest=digest)
        except MalformedMessage as error:
            raise InvalidRequest(error.detail) from None
        state = None
        with suppress(RedisError):  # the job is kept
            state = await self._find(job_id, user_id)
        return state or JobState(job_id, "waiting", job.name)

    async def _check_room(self, tag: str) -> None:
        # Count the request first: calls at the same time see each other in this count, but not yet
        # among the waiting jobs.
        if await self.kept.queue.count_request(tag=tag) > _MAX_RECENT_REQUESTS:
            raise TooManyJobs
        subqueues = [(kind.queue, kind.name) for kind in _USER_JOB_KINDS]
        if await self.kept.queue.count_waiting(subqueues, tag=tag) >= self.limit:
            raise TooManyJobs

    async def _work(self, user_id: str, request: schemas.UserJob) -> msgspec.Struct:
        if isinstance(request, schemas.SnapshotJobRequest):
            async with self.database.session() as session:
                await accounts.require_account(session, user_id, request.account_id)
            return catalog.SnapshotPositions(user_id=user_id, account_id=request.account_id)
        if isinstance(request, schemas.ExportJobRequest):
            packed = await self._packed(request.orders.of(user_id))
            return catalog.ExportOrders(user_id=user_id, orders=packed)
        begin = datetime.combine(request.day, time(), HOME_ZONE)
        of_day = order_list.OrderSelection(
            user_id=user_id, since=begin, until=begin + timedelta(days=1)
        )
        packed = await self._packed(of_day)
        return catalog.MakeStatement(user_id=user_id, day=request.day.isoformat(), orders=packed)

    async def _packed(self, selection: order_list.OrderSelection) -> bytes:
        async with self.database.session() as session:
            rows = await order_list.page_of_orders(
                session, selection, limit=_MAX_ORDERS_PER_JOB + 1
            )
        if len(rows) > _MAX_ORDERS_PER_JOB:
            raise catalog.TooManyOrders(f"more than {_MAX_ORDERS_PER_JOB} orders")
        exported = [row_of(view_of(row)) for row in rows]
        return await asyncio.to_thread(catalog.pack_orders, exported)  # some ms of compression

    def _started(self, task: asyncio.Task[Any]) -> None:
        """Logs why no worker was started. The job stays in its queue."""
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
