"""Looks for users who log in to a broker as one person, for an operator
(`infra/database/budgets.py`)."""

import asyncio

import structlog

from infra.database import budgets
from infra.database.engine import Database

#: Seconds between two looks: an operator hears of a pair within a minute.
CHECK_INTERVAL_S = 10.0

log = structlog.get_logger()


async def find_person_matches(database: Database, period_s: float = CHECK_INTERVAL_S) -> None:
    """Finds users who log in as one person, in a background loop."""
    while True:
        try:
            while await database.write(budgets.find_matches):
                pass
        except Exception as error:  # the boundary of a loop: a server is away
            log.warning(
                "person_matches_not_found", error=type(error).__name__, reason=str(error)[:200]
            )
        await asyncio.sleep(period_s)
