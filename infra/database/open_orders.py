"""A user's orders that are not final, as a worker needs them to know them again at the broker (O5)."""

from __future__ import annotations

import msgspec
from sqlalchemy import String, bindparam, text
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import accounts
from infra.database.accounts import Account
from infra.database.order_states import RANK
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState, PlaceOrder

#: The newest that go with a claim: 450 bytes each, and a signed message has at most 256 KiB.
LIMIT = 200
#: Days. No broker keeps an order for longer than its trading day; that of an evening before holidays, which
#: belongs to the day after them, has the longest.
AGE = 14

_FINAL = ", ".join(f"'{state.value}'" for state in sorted(FINAL_ORDER_STATES))
_NOT_BEGUN = ", ".join(
    f"'{state.value}'" for state in OrderState if RANK[state] < RANK[OrderState.SUBMITTING]
)
# An order without the broker's id can be known by its tag alone. Those of earlier releases, which begin with
# 00, began anew each day: after its day, such a tag is another order's.
_OPEN = text(f"""
(select cast(coalesce(json_agg(found.message order by found.created_at), '[]') as text)
   from (select created_at, json_build_object(
                'type', 'place_order', 'request_id', id, 'order_id', id, 'user_id', user_id,
                'account_id', account_id, 'symbol', symbol, 'side', side, 'quantity', quantity,
                'price_type', price_type, 'price', cast(price as text), 'time_in_force', time_in_force,
                'tag', tag, 'reply_to', '', 'generation', generation, 'reduce_only', reduce_only,
                'broker_order_id', broker_order_id, 'begun', state not in ({_NOT_BEGUN})) as message
           from orders
          where user_id = :user and state not in ({_FINAL})
            and created_at > now() - make_interval(days => {AGE})
            and (broker_order_id is not null or left(tag, 2) <> '00'
                 or trading_day >= cast(now() at time zone 'Asia/Taipei' as date))
          order by created_at desc
          limit {LIMIT}) as found)
""").bindparams(bindparam("user", type_=String))  # noqa: S608 - constants of ours
_decoder = msgspec.json.Decoder(list[PlaceOrder])


async def with_accounts(session: AsyncSession, user_id: str) -> tuple[list[Account], list[PlaceOrder]]:
    """`accounts.of_user` and the user's orders that are not final, oldest first, in one round trip."""
    wanted = accounts.stored_of(user_id).add_columns(_OPEN)
    rows = (await session.execute(wanted, {"user": user_id})).all()
    if not rows:
        return [], []
    return [accounts.account_of(row[0], row[1]) for row in rows], _decoder.decode(rows[0][2])
