"""Sees to it that an alert that was taken is carried out, though the process that took it dies.

Nobody sends an alert again, so after a 202 it is ours. What it asks for stands in PostgreSQL, from the 202 on
with a lease, which the process that carries it out renews. A lease that has run out is taken by any process
that sees it: the orders of an alert have ids made of what it says, so no leg is placed twice, whoever else
may still be at it. After the alert's deadline its end is written instead, with an entry in the audit trail.
"""

from __future__ import annotations

import asyncio

from api.http import log
from api.webhooks.service import LEASE, AlertProcessor
from infra import tasks
from infra.database.engine import Database
from infra.database.trading import webhooks
from worker_runtime.protocol.errors import BerthError

#: Seconds between two rounds: a lease is renewed several times before it runs out.
PERIOD = 2.0
#: Alerts taken on in one round.
MOST = 20


class AlertKeeper:
    """A loop of each API process."""

    def __init__(
        self, database: Database, desk: AlertProcessor, *, period: float = PERIOD, lease: float = LEASE
    ) -> None:
        self._database = database
        self._desk = desk
        self._period = period
        self._lease = lease
        self._task: asyncio.Task[None] | None = None
        self._log = log.logger()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="alert keeper")

    async def close(self) -> None:
        await tasks.cancel_tasks(self._task)

    async def round(self) -> int:
        """Keeps what is under way here, and takes on what nobody holds; returns how much that was. Raises
        `DatabaseUnavailable`."""
        mine = self._desk.under_way
        async with self._database.session() as session:
            if mine:
                await webhooks.hold_alerts(session, mine, self._lease)
            found = await webhooks.take_abandoned_alerts(session, lease=self._lease, most=MOST)
        for one in found:
            try:
                await self._desk.resume_alert(one)
            except BerthError as error:  # the next one may fare better; this one comes again
                self._log.warning("alert_not_carried_on", code=error.code)
            except Exception:  # the boundary of one alert: it must not hold up the others
                self._log.exception("alert_not_carried_on")
        return len(found)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            if not self._desk.ready:
                continue
            try:
                await self.round()
            except BerthError as error:  # PostgreSQL is away
                self._log.warning("alert_keeper_waits", code=error.code)
            except Exception:  # the boundary of a loop: one bad row must not stop it
                self._log.exception("alert_keeper_failed")
