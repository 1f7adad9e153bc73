"""Temporal Schedules: maintenance, the morning, the evening, instruments, the daily statements and
the daily report."""

import asyncio
from collections.abc import Callable, Mapping
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

from infra.market.calendar import HOME_ZONE_NAME
from infra.settings import Settings
from infra.temporal.client import RPC_TIMEOUT, unless_missing
from workflows import names
from workflows.instruments.messages import InstrumentsInput
from workflows.maintenance.messages import MaintenanceInput
from workflows.morning.messages import MorningInput
from workflows.reports.messages import DailyReportInput, StatementsInput

#: Seconds between two tries.
RETRY_INTERVAL_S = 5.0
#: Between two looks whether a broker's instruments are due.
INSTRUMENTS_INTERVAL = timedelta(minutes=15)

log = structlog.get_logger()


def _start(
    schedule_id: str,
    spec: ScheduleSpec,
    workflow: str,
    given: object,
    *,
    limit: timedelta,
    late: timedelta,
    summary: str,
) -> Schedule:
    """Starts `workflow` unless its last run is under way. `limit` is a run's, `late` its
    start's."""
    action = ScheduleActionStartWorkflow(
        workflow,
        given,
        id=schedule_id,
        task_queue=names.BULK_QUEUE,
        execution_timeout=limit,
        static_summary=summary,
    )
    policy = SchedulePolicy(overlap=ScheduleOverlapPolicy.SKIP, catchup_window=late)
    return Schedule(action=action, spec=spec, policy=policy)


def _at(clock: str, zone: str) -> ScheduleSpec:
    """Plans every day at `HH:MM` in `zone`: what begins then knows the trading days. A Saturday may
    be one."""
    hour, minute = (int(part) for part in clock.split(":"))
    days = ScheduleCalendarSpec(
        hour=[ScheduleRange(hour)],
        minute=[ScheduleRange(minute)],
        day_of_week=[ScheduleRange(0, 6)],
    )
    return ScheduleSpec(calendars=[days], time_zone_name=zone)


def _maintenance(settings: Settings) -> Schedule | None:
    """Plans a pass every `maintenance_period` seconds; none if that is 0."""
    if not settings.maintenance_period:
        return None
    return _start(
        names.MAINTENANCE_SCHEDULE,
        ScheduleSpec(
            intervals=[ScheduleIntervalSpec(every=timedelta(seconds=settings.maintenance_period))]
        ),
        names.MAINTENANCE,
        MaintenanceInput(),
        limit=timedelta(minutes=10),  # a pass that nobody served by then is of no use
        late=timedelta(minutes=1),  # one pass is enough after an outage of Temporal
        summary="scans all workers, and cleans up what two scans have found",
    )


def _connecting(settings: Settings, schedule_id: str, clock: str) -> Schedule | None:
    """Connects users every day at `clock` in the home zone; never if that is empty. The workflow
    knows the trading days."""
    if not clock:
        return None
    given = MorningInput(
        evening=schedule_id == names.EVENING_SCHEDULE,
        window=settings.morning_window,
        rate=settings.morning_rate,
        abreast=settings.morning_abreast,
        days=settings.morning_days,
    )
    return _start(
        schedule_id,
        _at(clock, HOME_ZONE_NAME),
        names.MORNING,
        given,
        limit=timedelta(hours=12),
        late=timedelta(minutes=30),  # then there are still users to connect
        summary="connects the users of recent days ahead of the bell",
    )


def sends_statements(settings: Settings) -> bool:
    """Returns True if there are daily statements; `auto` needs a mail server, or keys for
    webhooks."""
    if settings.statements == "auto":
        return bool(settings.mail_host or settings.webhook_key_file)
    return settings.statements == "on"


def _statements(settings: Settings) -> Schedule | None:
    """Plans statements every day at `statements_at` in `statements_zone`; the workflow knows which
    days had trading."""
    if not sends_statements(settings):
        return None
    return _start(
        names.STATEMENTS_SCHEDULE,
        _at(settings.statements_at, settings.statements_zone or HOME_ZONE_NAME),
        names.STATEMENTS,
        StatementsInput(rate=settings.statements_rate),
        limit=timedelta(hours=24),
        # Until the next day has ended, these are still the last statements.
        late=timedelta(hours=12),
        summary="sends the statements of the last day that has ended",
    )


def _report(settings: Settings) -> Schedule | None:
    """Plans reports every day at `report_at` in the home zone; never if that is empty. The activity
    knows the trading days."""
    if not settings.report_at:
        return None
    return _start(
        names.REPORT_SCHEDULE,
        _at(settings.report_at, HOME_ZONE_NAME),
        names.DAILY_REPORT,
        DailyReportInput(),
        limit=timedelta(hours=24),
        # On the same day, of which the activity asks whether it has trading.
        late=timedelta(hours=15),
        summary="makes the report of the last trading day",
    )


def _instruments(settings: Settings) -> Schedule | None:
    """Plans a look each `INSTRUMENTS_INTERVAL`: brokers open at different times in different
    zones, and an operator may designate an account at any time. There is none if
    `instruments_lead` is 0."""
    if not settings.instruments_lead:
        return None
    return _start(
        names.INSTRUMENTS_SCHEDULE,
        ScheduleSpec(intervals=[ScheduleIntervalSpec(every=INSTRUMENTS_INTERVAL)]),
        names.INSTRUMENTS,
        InstrumentsInput(lead=settings.instruments_lead),
        limit=timedelta(minutes=10),
        late=timedelta(minutes=1),  # one look is enough after an outage of Temporal
        summary="begins the loads of instruments that are due",
    )


#: Id → the schedule that the settings want, or None.
SCHEDULES: Mapping[str, Callable[[Settings], Schedule | None]] = {
    names.MAINTENANCE_SCHEDULE: _maintenance,
    names.MORNING_SCHEDULE: lambda its: _connecting(its, names.MORNING_SCHEDULE, its.morning_at),
    # For the users of an evening session.
    names.EVENING_SCHEDULE: lambda its: _connecting(its, names.EVENING_SCHEDULE, its.evening_at),
    names.STATEMENTS_SCHEDULE: _statements,
    names.REPORT_SCHEDULE: _report,
    names.INSTRUMENTS_SCHEDULE: _instruments,
}


async def ensure_schedules(
    client: Client, settings: Settings, *ids: str, keep: bool = False
) -> None:
    """Creates, updates or deletes these schedules, or all; one that is paused stays so. Raises
    `RPCError`.

    `keep`: only those that are missing are made. Several processes may do so at once.
    """
    for schedule_id in ids or SCHEDULES:
        await _ensure(client, schedule_id, SCHEDULES[schedule_id](settings), keep)


async def _ensure(client: Client, schedule_id: str, schedule: Schedule | None, keep: bool) -> None:
    present = client.get_schedule_handle(schedule_id)
    if schedule is None:
        return None if keep else await unless_missing(present.delete(rpc_timeout=RPC_TIMEOUT))

    def updated(known: ScheduleUpdateInput) -> ScheduleUpdate:
        schedule.state = known.description.schedule.state
        return ScheduleUpdate(schedule=schedule)

    try:
        await client.create_schedule(schedule_id, schedule, rpc_timeout=RPC_TIMEOUT)
        log.info("schedule_made", schedule=schedule_id)
    except ScheduleAlreadyRunningError:
        if not keep:
            await present.update(updated, rpc_timeout=RPC_TIMEOUT)


async def make_schedules(client: Client, settings: Settings) -> None:
    """Makes the schedules once, in a background loop, as soon as Temporal answers.

    What is missing later is made again by the restorer (`activities/orchestrator/restorer.py`).
    """
    while True:
        try:
            await ensure_schedules(client, settings)
            break
        except RPCError as error:
            log.warning("schedules_not_made", reason=str(error)[:200])
            await asyncio.sleep(RETRY_INTERVAL_S)
    await asyncio.Event().wait()  # a loop never ends by itself
