"""Temporal Schedules: maintenance, the morning and the daily statements."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import structlog
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleCalendarSpec,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleRange,
    ScheduleSpec,
    ScheduleUpdate,
    ScheduleUpdateInput,
)
from temporalio.service import RPCError

from infra.settings import Settings
from infra.temporal.client import CALL, unless_missing
from workflows import names
from workflows.maintenance import messages as mm
from workflows.morning import messages as mo
from workflows.reports import messages as sm

#: Seconds between two tries.
RETRY = 5.0

log = structlog.get_logger()


async def _ensure(
    client: Client,
    schedule_id: str,
    spec: ScheduleSpec | None,
    workflow: str,
    given: object,
    *,
    limit: timedelta,
    late: timedelta,
    summary: str,
) -> None:
    """Creates or updates the schedule, which stays paused if it is; without `spec` it is deleted.

    It starts `workflow` unless its last run is under way. `limit` is a run's, `late` its start's. Several
    orchestrators may do so at once. Raises `RPCError`.
    """
    present = client.get_schedule_handle(schedule_id)
    if spec is None:
        return await unless_missing(present.delete(rpc_timeout=CALL))
    action = ScheduleActionStartWorkflow(
        workflow,
        given,
        id=schedule_id,
        task_queue=names.BULK_QUEUE,
        execution_timeout=limit,
        static_summary=summary,
    )
    policy = SchedulePolicy(overlap=ScheduleOverlapPolicy.SKIP, catchup_window=late)
    schedule = Schedule(action=action, spec=spec, policy=policy)

    def updated(known: ScheduleUpdateInput) -> ScheduleUpdate:
        schedule.state = known.description.schedule.state
        return ScheduleUpdate(schedule=schedule)

    try:
        await client.create_schedule(schedule_id, schedule, rpc_timeout=CALL)
        log.info("schedule_made", schedule=schedule_id)
    except ScheduleAlreadyRunningError:
        await present.update(updated, rpc_timeout=CALL)


def _at(clock: str, zone: str, *, weekdays: bool = False) -> ScheduleSpec:
    """Every day, or every weekday, at `HH:MM` in `zone`."""
    hour, minute = (int(part) for part in clock.split(":"))
    days = ScheduleCalendarSpec(
        hour=[ScheduleRange(hour)],
        minute=[ScheduleRange(minute)],
        day_of_week=[ScheduleRange(1, 5) if weekdays else ScheduleRange(0, 6)],
    )
    return ScheduleSpec(calendars=[days], time_zone_name=zone)


async def ensure_maintenance(client: Client, settings: Settings) -> None:
    """A pass every `maintenance_period` seconds; 0: none."""
    every = ScheduleIntervalSpec(every=timedelta(seconds=settings.maintenance_period))
    await _ensure(
        client,
        names.MAINTENANCE_SCHEDULE,
        ScheduleSpec(intervals=[every]) if settings.maintenance_period else None,
        names.MAINTENANCE,
        mm.MaintenanceInput(),
        limit=timedelta(minutes=10),  # a pass that nobody served by then is of no use
        late=timedelta(minutes=1),  # one pass is enough after an outage of Temporal
        summary="scans all workers, and cleans up what two scans have found",
    )


async def ensure_morning(client: Client, settings: Settings) -> None:
    """On weekdays at `morning_at` in Taiwan; empty: never. The workflow knows the holidays."""
    given = mo.MorningInput(
        window=settings.morning_window,
        rate=settings.morning_rate,
        abreast=settings.morning_abreast,
        days=settings.morning_days,
    )
    await _ensure(
        client,
        names.MORNING_SCHEDULE,
        _at(settings.morning_at, "Asia/Taipei", weekdays=True) if settings.morning_at else None,
        names.MORNING,
        given,
        limit=timedelta(hours=12),
        late=timedelta(minutes=30),  # then there are still users to connect
        summary="connects the users of recent days ahead of the bell",
    )


def sends_statements(settings: Settings) -> bool:
    """Whether there are daily statements; `auto` needs a mail server, or keys for webhooks."""
    if settings.statements == "auto":
        return bool(settings.mail_host or settings.webhook_key_files)
    return settings.statements == "on"


async def ensure_statements(client: Client, settings: Settings) -> None:
    """Every day at `statements_at` in `statements_zone`; the workflow knows which days had trading."""
    at = _at(settings.statements_at, settings.statements_zone)
    await _ensure(
        client,
        names.STATEMENTS_SCHEDULE,
        at if sends_statements(settings) else None,
        names.STATEMENTS,
        sm.StatementsInput(rate=settings.statements_rate),
        limit=timedelta(hours=24),
        late=timedelta(hours=12),  # until the next day has ended, these are still the last statements
        summary="sends the statements of the last day that has ended",
    )


class ScheduleMaker:
    """A background loop: creates the schedules once, as soon as Temporal answers."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client = client
        self._settings = settings

    async def run(self) -> None:
        while True:
            try:
                await ensure_maintenance(self._client, self._settings)
                await ensure_morning(self._client, self._settings)
                await ensure_statements(self._client, self._settings)
                break
            except RPCError as error:
                log.warning("schedules_not_made", reason=str(error)[:200])
                await asyncio.sleep(RETRY)
        await asyncio.Event().wait()  # a loop never ends by itself
