"""Writes to PostgreSQL what workers answered, in case the recorder is away.

The recorder writes the same from the event stream, usually before us. An answer can also be read from its
response key for 60 s (`placer.py`); this makes sure that it is still known after that. Both writers only
move an order forward, so their order does not matter.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import ARRAY, Uuid, any_, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from api.http import log
from infra import tasks
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.models import Order
from infra.database.orders import recording
from infra.database.orders.states import rank
from worker_runtime.protocol.messages import OrderOutcome

#: Seconds after which an answer is written, up to twice as many: the recorder needs milliseconds, and then
#: nothing is left to do.
PERIOD = 2.0
#: Outcomes kept while PostgreSQL is away. About 300 bytes each; beyond it the recorder alone must do.
MOST = 50_000


@dataclass(frozen=True, slots=True)
class NotedOutcome:
    outcome: OrderOutcome
    code: str | None


class OutcomeWriter:
    """Notes outcomes and writes them in batches."""

    def __init__(self, database: Database) -> None:
        self._database = database
        #: Noted since the last round: the recorder still has its time.
        self._noted: dict[str, NotedOutcome] = {}
        self._waiting: dict[str, NotedOutcome] = {}
        self._task: asyncio.Task[None] | None = None
        self._log = log.logger()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="settler")

    async def close(self) -> None:
        """Writes what is left, if PostgreSQL answers."""
        await tasks.cancel_tasks(self._task)
        self._age()
        try:
            await self._write()
        except Exception:  # the boundary of the process: what is left, the recorder writes
            self._log.exception("settler_left", waiting=len(self._waiting))

    def note(self, settlement: NotedOutcome) -> None:
        """To be written by the round after the next."""
        if len(self._waiting) + len(self._noted) < MOST:
            self._noted[settlement.outcome.order_id] = settlement
        else:
            self._log.error("settler_full", order=settlement.outcome.order_id)

    async def settle(self, settlement: NotedOutcome) -> Order | None:
        """Writes now, and returns the order as it is then. For outcomes that no worker will ever report.

        None if PostgreSQL is away: then it is written later.
        """
        try:
            async with self._database.session() as session:
                await recording.apply_outcome(session, settlement.outcome, settlement.code)
                return await recording.get_order(session, UUID(settlement.outcome.order_id))
        except DatabaseUnavailable as error:
            self._log.warning("settle_later", order=settlement.outcome.order_id, reason=error.detail)
            self.note(settlement)
            return None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            try:
                await self._write()
            except DatabaseUnavailable as error:
                self._log.warning("settler_waits", reason=error.detail, waiting=len(self._waiting))
            except Exception:  # the boundary of a loop: one bad outcome must not stop it
                self._log.exception("settler_failed", waiting=len(self._waiting))
            self._age()

    def _age(self) -> None:
        self._waiting |= self._noted
        self._noted = {}

    async def _write(self) -> None:
        while self._waiting:
            batch = dict(list(self._waiting.items())[:200])
            async with self._database.session() as session:
                for order_id in await self._behind(session, batch):
                    settlement = batch[order_id]
                    await recording.apply_outcome(session, settlement.outcome, settlement.code)
            for order_id, settlement in batch.items():
                if self._waiting.get(order_id) is settlement:
                    del self._waiting[order_id]

    async def _behind(self, session: AsyncSession, batch: dict[str, NotedOutcome]) -> list[str]:
        """Orders that the recorder has not brought as far. Usually none: one query in two seconds instead of
        an update for each order. With an array, so that it is the same statement for any number of ids."""
        ids = literal([UUID(order_id) for order_id in batch], ARRAY(Uuid))
        rows = await session.execute(
            select(Order.id, Order.state, Order.filled_quantity).where(Order.id == any_(ids))
        )
        return [
            str(order_id)
            for order_id, state, filled in rows
            if rank(state) < rank(batch[str(order_id)].outcome.state)
            or filled < batch[str(order_id)].outcome.filled_quantity
        ]
