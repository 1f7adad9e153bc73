"""The feed of changes of a user's orders. A reader that continues after its last number misses
none.

A trigger writes the id of the changing transaction into `orders.changed` and notifies
`ORDERS_CHANNEL` with the user's id, once per transaction. Transaction ids are assigned before the
commit, so a reader takes only those below the oldest running transaction: nothing can still appear
there. Orders need no lock or counter.

All changes of one transaction have one number and are read together. An order that changes again
gets the later number: a reader that is behind sees it once, in its last state.

Numbers stay valid across a failover of the database, but not across a restore from a dump.
"""

from collections.abc import Sequence

from sqlalchemy import BigInteger, String, cast, exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import Order

#: PostgreSQL notifies this channel, with the user's id, of changed orders. It does not for new
#: ones: commits that notify pass one at a time (PostgreSQL's lock of the notification queue).
ORDERS_CHANNEL = "berth_orders"

#: Every transaction below is committed and visible, or rolled back.
_HORIZON = cast(cast(func.pg_snapshot_xmin(func.pg_current_snapshot()), String), BigInteger)


async def changes_behind(
    session: AsyncSession, user_id: str, last: int, *, limit: int = 100
) -> Sequence[Order]:
    """Returns changed orders after the number `last`: about `limit`, since equal numbers stay
    together."""
    changed = select(Order).where(
        Order.user_id == user_id, Order.changed > last, Order.changed < _HORIZON
    )
    rows = await session.scalars(changed.order_by(Order.changed).fetch(limit, with_ties=True))
    return sorted(rows, key=lambda order: (order.changed, order.updated_at))


async def read_outlook(session: AsyncSession, user_id: str, last: int) -> tuple[int, bool]:
    """Returns the number below which no change will appear, and whether there are changes after
    `last`, perhaps above it."""
    has_later = exists().where(Order.user_id == user_id, Order.changed > last)
    horizon, is_changed = (await session.execute(select(_HORIZON, has_later))).one()
    return horizon, is_changed
