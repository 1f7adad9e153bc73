"""Names that operators gave to symbols, for signals."""

from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import upsert
from infra.database.trading.models import SymbolName


async def list_names(session: AsyncSession) -> Sequence[SymbolName]:
    return (await session.scalars(select(SymbolName).order_by(SymbolName.name))).all()


async def load_names(session: AsyncSession) -> dict[str, str]:
    """Returns name → symbol."""
    rows = await session.execute(select(SymbolName.name, SymbolName.symbol))
    return {name: symbol for name, symbol in rows}


async def put_name(session: AsyncSession, name: str, symbol: str, *, actor: str) -> SymbolName:
    """Gives a name a meaning; signals that came before keep theirs."""
    values = {"symbol": symbol, "actor": actor}
    await session.execute(upsert(SymbolName, {"name": name}, values, at=func.clock_timestamp()))
    audit.append_entry(session, actor, "symbol_name.set", f"symbol_name:{name}", symbol=symbol)
    return await session.get_one(SymbolName, name, populate_existing=True)


async def delete_name(session: AsyncSession, name: str, *, actor: str) -> bool:
    """Returns False if there was no such name."""
    gone = await session.scalar(delete(SymbolName).filter_by(name=name).returning(SymbolName.name))
    if gone is not None:
        audit.append_entry(session, actor, "symbol_name.deleted", f"symbol_name:{name}")
    return gone is not None
