"""What stands in the way of an order: a switch, one of unknown outcome, books that differ from the broker's.

`orders.accept` asks in the statement that writes an order; `refusal` says why it wrote none.
"""

from __future__ import annotations

from sqlalchemy import String, bindparam, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import switches
from infra.database.models import BrokerAccount
from infra.database.trading_models import Reconciliation
from worker_runtime.protocol.errors import (
    AccountBlocked,
    BerthError,
    ReducingOnly,
    SymbolBlocked,
    TradingHalted,
    UnknownAccount,
)
from worker_runtime.protocol.switches import SwitchState

#: Orders of unknown outcome that block another one. One of them is the order whose submission was begun by a
#: worker that has ended: nobody will tell how it went, and perhaps nobody has called it unknown yet. (What is
#: in a queue by then the worker refuses: `worker_runtime/unsettled.py`.)
#: `offset 0` keeps the two questions apart: the inner one is that of the index `orders_unsettled`. As one,
#: they brought `orders_by_state` in, with every order that was submitting since the last vacuum. The second
#: one keeps PostgreSQL from reading all events at once for it, which it prefers while its tables are new.
#: A rolling code (TXFR1) stands for one of its product's contracts: which one, only the broker knows.
UNSETTLED = """
select id, created_at from (
    select id, created_at, state from orders
     where :unknown_blocks <> 'off' and user_id = :user_id and account_id = :account_id
       and state in ('unknown', 'submitting')
       and (:unknown_blocks = 'account' or symbol = :symbol
            or left(symbol, 3) = left(:symbol, 3)
               and (symbol ~ '^[A-Z]{2}[A-Z0-9]R[12]$' or :symbol ~ '^[A-Z]{2}[A-Z0-9]R[12]$'))
    offset 0) as begun_once
 where state = 'unknown' or not exists (
         select from order_events as begun
           join worker_sessions as serving on serving.epoch = cast(begun.data ->> 'epoch' as bigint)
          where begun.event_id = begun_once.id || '\\:submitting'
            and serving.user_id = :user_id and serving.ended_at is null offset 0)
"""
FIRST = text(f"select id from ({UNSETTLED}) as unsettled order by created_at limit 1").bindparams(  # noqa: S608 - a constant of ours
    *(bindparam(name, type_=String) for name in ("unknown_blocks", "user_id", "account_id", "symbol"))
)


async def refusal(
    session: AsyncSession,
    *,
    user_id: str,
    account_id: str,
    symbol: str,
    reduce_only: bool,
    unknown_blocks: str,
) -> BerthError:
    """Why an order was not accepted, for the few that are not."""
    state = (await switches.of_user(session, user_id)).of(account_id)
    if state is SwitchState.HALTED:
        return TradingHalted()
    if state is SwitchState.REDUCING and not reduce_only:
        return ReducingOnly()
    wanted = {
        "unknown_blocks": unknown_blocks,
        "user_id": user_id,
        "account_id": account_id,
        "symbol": symbol,
    }
    blocking = await session.scalar(FIRST, wanted)
    if blocking is not None:
        return SymbolBlocked(f"the outcome of order {blocking} in this account is unknown; settle it first")
    difference = await session.scalar(
        select(Reconciliation.id)
        .where(Reconciliation.user_id == user_id, Reconciliation.account_id == account_id)
        .where(Reconciliation.blocks, Reconciliation.resolved_at.is_(None))
        .limit(1)
    )
    if difference is not None:
        return AccountBlocked(
            f"reconciliation {difference} of this account is open; a person has to look first"
        )
    account = select(BrokerAccount.account_id).where(
        BrokerAccount.user_id == user_id, BrokerAccount.account_id == account_id
    )
    if await session.scalar(account) is None:
        return UnknownAccount(f"user {user_id} has no account {account_id}")
    # What stood in the way was settled between the two looks.
    return SymbolBlocked("another order had to be settled first; it is now: place the order again")
