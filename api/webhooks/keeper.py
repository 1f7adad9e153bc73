"""Finishes accepted alerts whose process died.

Nobody sends an alert again after a 202. So PostgreSQL holds the alert with a lease, which the process that
works on it renews. Any process takes over an alert whose lease has run out. No order is placed twice: its
client order id comes from the alert's content. After the deadline the keeper closes the alert in the audit
trail instead.
"""

from __future__ import annotations

import asyncio

import structlog

from api.webhooks.service import LEASE, AlertProcessor
from infra.database.engine import Database
from infra.database.trading import webhooks
from worker_runtime.protocol.errors import BerthError

#: Seconds between two rounds: a lease is renewed several times before it runs out.
PERIOD = 2.0
#: Alerts taken on in one round.
MOST = 20


class AlertKeeper:
    """A loop of each API process."""

    def __init__(self, database: Database, processor: AlertProcessor) -> None:
        self._database = database
        self._processor = processor
        self._log = structlog.get_logger()

    async def keep_alerts(self) -> int:
        """Keeps what is under way here, and takes on what nobody holds; returns how much that was. Raises
        `DatabaseUnavailable`."""
        mine = self._processor.under_way
        async with self._database.session() as session:
            if mine:
                await webhooks.hold_alerts(session, mine, LEASE)
            found = await webhooks.take_abandoned_alerts(session, lease=LEASE, most=MOST)
        for one in found:
            try:
                await self._processor.resume_alert(one)
            except BerthError as error:  # the next one may fare better; this one comes again
                self._log.warning("alert_not_resumed", code=error.code)
            except Exception:  # the boundary of one alert: it must not hold up the others
                self._log.exception("alert_not_resumed")
        return len(found)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            if not self._processor.ready:
                continue
            try:
                await self.keep_alerts()
            except BerthError as error:  # PostgreSQL is away
                self._log.warning("alert_keeper_waits", code=error.code)
            except Exception:  # the boundary of a loop: one bad row must not stop it
                self._log.exception("alert_keeper_failed")
