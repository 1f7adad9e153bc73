"""Temporal Schedules: what begins by the clock and not because somebody asks."""

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
from temporalio.service import RPCError, RPCStatusCode

from infra.settings import Settings
from workflows import names
from workflows.maintenance import messages as mm
from workflows.morning import messages as mo
from workflows.reports import messages as sm

#: What one call may take.
RPC = timedelta(seconds=5)
#: Seconds between two tries.
RETRY = 5.0

log = structlog.get_logger()


async def ensure_schedule(client: Client, schedule_id: str, schedule: Schedule) -> None:
    """Makes the schedule, or brings the one that is there up to date; whether it is paused stays as it is.

    Several orchestrators may do so at once. Raises `RPCError`.
    """
    try:
        await client.create_schedule(schedule_id, schedule, rpc_timeout=RPC)
        log.info("schedule_made", schedule=schedule_id)
    except ScheduleAlreadyRunningError:

        def updated(given: ScheduleUpdateInput) -> ScheduleUpdate:
            schedule.state = given.description.schedule.state
            return ScheduleUpdate(schedule=schedule)

        await client.get_schedule_handle(schedule_id).update(updated, rpc_timeout=RPC)


async def remove_schedule(client: Client, schedule_id: str) -> None:
    """No error if there is none. Raises `RPCError`."""
    try:
        await client.get_schedule_handle(schedule_id).delete(rpc_timeout=RPC)
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise


async def ensure_maintenance(client: Client, settings: Settings) -> None:
    """A pass every `maintenance_period` seconds; one that is still under way is not overtaken.

    The catch-up window of a minute: after an outage of Temporal one pass is enough, and the first ones do
    nothing but look.
    """
    if not settings.maintenance_period:
        await remove_schedule(client, names.MAINTENANCE_SCHEDULE)
        return
    action = ScheduleActionStartWorkflow(
        names.MAINTENANCE,
        mm.MaintenanceInput(),
        id=names.MAINTENANCE_ID,
        task_queue=names.BULK_QUEUE,
        # Nobody serves the queue: the pass is of no use later.
        execution_timeout=timedelta(minutes=10),
        static_summary="looks at all workers, and cleans up what two looks have seen",
    )
    every = ScheduleIntervalSpec(every=timedelta(seconds=settings.maintenance_period))
    schedule = Schedule(
        action=action,
        spec=ScheduleSpec(intervals=[every]),
        policy=SchedulePolicy(overlap=ScheduleOverlapPolicy.SKIP, catchup_window=timedelta(minutes=1)),
    )
    await ensure_schedule(client, names.MAINTENANCE_SCHEDULE, schedule)


async def ensure_morning(client: Client, settings: Settings) -> None:
    """On weekdays at `morning_at` in Taiwan; the workflow knows the holidays.

    The catch-up window: a start that is half an hour late still finds users to connect.
    """
    if not settings.morning_at:
        await remove_schedule(client, names.MORNING_SCHEDULE)
        return
    hour, minute = (int(part) for part in settings.morning_at.split(":"))
    given = mo.MorningInput(
        window=settings.morning_window,
        rate=settings.morning_rate,
        abreast=settings.morning_abreast,
        days=settings.morning_days,
    )
    action = ScheduleActionStartWorkflow(
        names.MORNING,
        given,
        id=names.MORNING_SCHEDULE,
        task_queue=names.BULK_QUEUE,
        execution_timeout=timedelta(hours=12),
        static_summary="connects the users of recent days ahead of the bell",
    )
    weekdays = ScheduleCalendarSpec(
        hour=[ScheduleRange(hour)], minute=[ScheduleRange(minute)], day_of_week=[ScheduleRange(1, 5)]
    )
    schedule = Schedule(
        action=action,
        spec=ScheduleSpec(calendars=[weekdays], time_zone_name="Asia/Taipei"),
        policy=SchedulePolicy(overlap=ScheduleOverlapPolicy.SKIP, catchup_window=timedelta(minutes=30)),
    )
    await ensure_schedule(client, names.MORNING_SCHEDULE, schedule)


def sends_statements(settings: Settings) -> bool:
    """Whether there are daily statements: by themselves they need a mail server, or keys for webhooks."""
    if settings.statements == "auto":
        return bool(settings.mail_host or settings.webhook_key_files)
    return settings.statements == "on"


async def ensure_statements(client: Client, settings: Settings) -> None:
    """Every day at `statements_at` in `statements_zone`; the workflow knows which days had trading.

    The catch-up window: until the next day has ended, a late start still sends those of the same day.
    """
    if not sends_statements(settings):
        await remove_schedule(client, names.STATEMENTS_SCHEDULE)
        return
    hour, minute = (int(part) for part in settings.statements_at.split(":"))
    action = ScheduleActionStartWorkflow(
        names.STATEMENTS,
        sm.StatementsInput(rate=settings.statements_rate),
        id=names.STATEMENTS_SCHEDULE,
        task_queue=names.BULK_QUEUE,
        execution_timeout=timedelta(hours=24),
        static_summary="sends the statements of the last day that has ended",
    )
    daily = ScheduleCalendarSpec(hour=[ScheduleRange(hour)], minute=[ScheduleRange(minute)])
    schedule = Schedule(
        action=action,
        spec=ScheduleSpec(calendars=[daily], time_zone_name=settings.statements_zone),
        policy=SchedulePolicy(overlap=ScheduleOverlapPolicy.SKIP, catchup_window=timedelta(hours=12)),
    )
    await ensure_schedule(client, names.STATEMENTS_SCHEDULE, schedule)


class ScheduleMaker:
    """A background loop: makes the schedules once, as soon as Temporal lets it."""

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
