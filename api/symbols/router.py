"""Routes for the names that operators give to symbols, so that signals may use them."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from api.container import Call
from api.http import errors, problems
from api.symbols.schemas import SymbolNameList, SymbolNameRequest, SymbolNameView
from infra.database.trading import symbol_names
from infra.market.signal_symbols import require_readable
from worker_runtime.protocol.errors import UnknownSymbol

router = APIRouter(tags=["symbols"])

Name = Annotated[
    str,
    Path(
        pattern=r"^[A-Za-z0-9./_:!-]+$",
        max_length=64,
        description="As it comes in signals, in any case; with its exchange or without.",
        examples=["FITX"],
    ),
]


@router.get("/symbols", summary="List names of symbols")
async def list_symbol_names(call: Call) -> SymbolNameList:
    """Shows the names that operators gave for signals, without those that every installation
    understands."""
    rows = await call.database.fetch(symbol_names.list_names)
    shown = [SymbolNameView.model_validate(row) for row in rows]
    if not call.caller.staff:
        shown = [view.model_copy(update={"actor": None}) for view in shown]
    return SymbolNameList(symbols=shown)


@router.put(
    "/symbols/{name}",
    summary="Set the meaning of a symbol's name",
    responses=problems.responses(errors.InvalidRequest, UnknownSymbol),
)
async def put_symbol_name(name: Name, body: SymbolNameRequest, call: Call) -> SymbolNameView:
    """Applies to signals that come from now on; earlier ones keep the meaning they had."""
    require_readable(body.symbol)
    row = await call.database.write(
        symbol_names.put_name, name.upper(), body.symbol, actor=call.actor
    )
    return SymbolNameView.model_validate(row)


@router.delete(
    "/symbols/{name}",
    status_code=204,
    summary="Delete a symbol's name",
    responses=problems.responses(errors.NotFound),
)
async def delete_symbol_name(name: Name, call: Call) -> Response:
    """Lets signals with this name mean, from now on, what they mean without the table."""
    if not await call.database.write(symbol_names.delete_name, name.upper(), actor=call.actor):
        raise errors.NotFound
    return Response(status_code=204)
