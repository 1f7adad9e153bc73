"""The activities of maintenance: scan,
compare with the scan before, clean up what both have found."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

import structlog
from redis.exceptions import RedisError
from temporalio import activity

from activities.heartbeat import beating
from activities.maintenance.anomalies import OverdueLimits, find_anomalies, guard_reason, is_many
from activities.maintenance.cleanup import AnomalyCleaner
from activities.maintenance.scan import FleetScanner
from infra.database.engine import Database
from infra.database.workers import launches, passes
from infra.processes import boot_id
from infra.settings import Settings
from infra.valkey.failures import code_of
from infra.valkey.worker_users import WorkerUsers
from infra.worker_task import LauncherUnreachable
from workflows.maintenance.messages import Batch, Cleaned, FinishPass, MaintenanceInput, Scanned

#: Seconds that an assignment may go without a connected worker: a claim or launch (65 s) and three
#: logins with their pauses (82 s), and as much again.
MAX_UNCONNECTED_S = 300.0
#: Seconds beyond twice the idle timeout that a worker may be unused: its workflow checks at most 20
#: min late (docs/how-it-works/lifecycle.md). A worker of the morning waits `morning_window` for its
#: bell, too, and at most 15 min more for a later one.
IDLE_MARGIN_S = 1800.0
#: Seconds beyond a mark's life between the two passes that must see the same anomaly: a mark that
#: the first one saw, and that nobody renews, is gone when the second one looks.
CONFIRM_MARGIN_S = 10.0

log = structlog.get_logger()


@dataclass(eq=False, repr=False)
class MaintenanceActivities:
    """Activities `scan_fleet`, `clean_up`, `finish_pass`. Safe to run twice."""

    scanner: FleetScanner
    cleaner: AnomalyCleaner
    database: Database
    settings: Settings
    users: WorkerUsers | None = None
    #: Fewest seconds between these two passes; None: as the constant says.
    confirm: float | None = None

    def __post_init__(self) -> None:
        own = self.settings
        self._confirm = own.mark_ttl + CONFIRM_MARGIN_S if self.confirm is None else self.confirm
        idle = 2 * own.idle_timeout + own.morning_window + IDLE_MARGIN_S
        self._limits = OverdueLimits(
            connect=MAX_UNCONNECTED_S, idle=idle, launch=own.launch_timeout
        )
        self._boot = boot_id()

    @activity.defn
    async def scan_fleet(self, request: MaintenanceInput) -> Scanned:
        """Scans all workers and compares with the pass before.
        A failed scan counts as a guarded pass.

        With `override_guard` it compares with the last pass that is old enough, guarded or not.
        """
        began, override = time.monotonic(), request.override_guard
        confirm = self._confirm
        async with self.database.session() as session:
            before = await passes.latest_pass(session, older_than=confirm if override else 0.0)
        if before is not None and not override and self._seconds_since(before) < confirm:
            return Scanned(number=0, guarded="too soon after the last pass")
        place, workers, seen, running = passes.PassBasis(), 0, None, list[str]()
        suspects: list[passes.Suspect] = []
        confirmed: list[passes.Suspect] = []
        try:
            seen = await self.scanner.scan_all()
        except (RedisError, OSError, LauncherUnreachable) as error:
            log.warning(
                "maintenance_cannot_read", error=type(error).__name__, reason=str(error)[:200]
            )
            away = isinstance(error, LauncherUnreachable)
            why = passes.LAUNCHER_UNREAD if away else "Valkey could not be read"
            if code := code_of(error):
                why += f" ({code})"
        else:
            place, workers = seen.place, seen.size
            running = [task.worker_id for task in seen.tasks]
            suspects = await asyncio.to_thread(find_anomalies, seen, self._limits)
            why = guard_reason(seen.summary(len(suspects)), before, override=override)
            if not why and before is not None and (override or not before.guarded):
                known = set(before.suspects)
                confirmed = [suspect for suspect in suspects if suspect in known]
        async with self.database.session() as session:
            if seen is not None and not why:
                await launches.purge_ended(session, self.settings.worker_history_days, running)
            number = await passes.begin_pass(
                session,
                place=place,
                boot=self._boot,
                boottime=_boottime(),
                scanned=workers,
                scan_seconds=time.monotonic() - began,
                guarded=why,
                suspects=suspects,
                confirmed=confirmed,
            )
        if self.users and seen is not None and not why:
            with suppress(RedisError, OSError):  # the next pass deletes them
                await self.users.delete_unused(running)
        return Scanned(
            number=number,
            workers=workers,
            found=len(suspects),
            confirmed=len(confirmed),
            guarded=why,
        )

    def _seconds_since(self, before: passes.PassRecord) -> float:
        """Returns the seconds since a pass, by the monotonic clock if that pass was on this
        host."""
        if before.boot == self._boot:
            return _boottime() - before.boottime
        return before.age

    @activity.defn
    async def clean_up(self, batch: Batch) -> Cleaned:
        """Checks these anomalies once more and cleans up what is left.

        A second attempt cannot tell what healed by itself
        from what the first one cleaned up: `earlier`.
        """
        async with beating():
            return await self._clean_up(
                batch, gone="earlier" if activity.info().attempt > 1 else "healed"
            )

    async def _clean_up(self, batch: Batch, *, gone: str) -> Cleaned:
        async with self.database.session() as session:
            basis = await passes.basis_of_pass(session, batch.number)
            suspects = await passes.confirmed_batch(session, batch.number, batch.first, batch.count)
        if basis is None or not suspects:
            return Cleaned()
        try:
            seen = await self.scanner.scan_suspects(suspects, batch.number)
            if _world_changed(seen.place, basis):
                return Cleaned(outcomes={"outage": len(suspects)})
            still = set(find_anomalies(seen, self._limits))
            due = [suspect for suspect in suspects if suspect in still]
            outcomes = await self.cleaner.clean(due, seen)
        except (RedisError, LauncherUnreachable) as error:
            log.warning(
                "maintenance_cannot_read", error=type(error).__name__, reason=str(error)[:200]
            )
            return Cleaned(outcomes={"outage": len(suspects)})
        if len(due) < len(suspects):
            outcomes[gone] = outcomes.get(gone, 0) + len(suspects) - len(due)
        return Cleaned(outcomes=outcomes)

    @activity.defn
    async def finish_pass(self, request: FinishPass) -> float:
        """Records and logs the outcome of a pass; returns its seconds."""
        async with self.database.session() as session:
            seconds = await passes.finish_pass(session, request.number, request.outcomes)
            shown = await passes.pass_summary(session)
        if shown is not None:
            write = log.warning if shown.guarded else log.info
            write(
                "maintenance_pass",
                workers=shown.scanned,
                found=shown.found,
                outcomes=request.outcomes,
                guarded=shown.guarded,
                seconds=round(seconds, 3),
                scan_seconds=round(shown.scan_seconds, 3),
            )
        return seconds


def _world_changed(now: passes.PassBasis, then: passes.PassBasis) -> bool:
    """Returns True if Valkey, its data or the launcher's list are not those of the pass."""
    other = (now.generation, now.server) != (then.generation, then.server)
    return other or is_many(then.tasks - now.tasks, then.tasks)


def _boottime() -> float:
    """Returns monotonic seconds that also count while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
