"""Daily quotas: how many audited acts a user may ask for in a day, over all of their keys.

Nothing deletes an entry of the audit trail for a year, so a user must not be able to fill it. A
user has one row a day here, whatever they ask for. Orders and their cancels are not counted: they
have limits of their own (`PreTradeChecks`), and a cancel is never refused because of a quota.
"""

from datetime import datetime, time, timedelta

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import DailyActs
from infra.market.calendar import HOME_ZONE, HOME_ZONE_NAME
from worker_runtime.protocol.errors import BerthError

#: Acts of a user in a day of the home zone. A program that stores credentials and makes a
#: statement every hour for each of 32 accounts (`MAX_ACCOUNTS`) asks for 1,536.
MAX_DAILY_ACTS = 2_000
#: What only ends or reduces something (a pause, a halt, a revocation) is taken beyond that, up to
#: this.
MAX_DAILY_ENDS = 10_000


class DailyQuotaReached(BerthError, code="DAILY_QUOTA", retryable=True, status=429):
    """The user has reached the daily limit of these calls. The count starts again at midnight in
    the home zone."""


async def spend_act(
    session: AsyncSession, user_id: str, *, ends: bool, now: datetime | None = None
) -> None:
    """Counts one act of a user. Raises `DailyQuotaReached`.

    `ends`: it only ends or reduces something.
    """
    now = now or datetime.now(HOME_ZONE)
    limit = MAX_DAILY_ENDS if ends else MAX_DAILY_ACTS
    row = insert(DailyActs).values(user_id=user_id, day=now.date(), acts=1)
    counted = row.on_conflict_do_update(
        index_elements=["user_id", "day"],
        set_={"acts": DailyActs.acts + 1},
        where=DailyActs.acts < limit,
    )
    if await session.scalar(counted.returning(DailyActs.acts)) is None:
        midnight = datetime.combine(now.date() + timedelta(days=1), time(), HOME_ZONE)
        raise DailyQuotaReached(
            f"{user_id} has asked for {limit} changes today. Wait until midnight in "
            f"{HOME_ZONE_NAME}. Orders and cancels still pass"
            + ("." if ends else ", and so does what ends or pauses something."),
            retry_after=(midnight - now).total_seconds(),
        )
