"""Routes for the names that operators give to symbols, so that signals may use them."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import Field, field_validator

from api.container import Call
from api.http import errors, problems
from api.http.fields import Body, View
from infra.database.trading import symbol_names

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


class SymbolNameRequest(Body):
    """What a name means."""

    symbol: str = Field(
        pattern=r"^[A-Za-z0-9./_:!-]+$",
        max_length=32,
        description="A symbol (`2330`, `TXFL6`), or one that is understood without a table "
        "(`TXF1!`).",
    )

    @field_validator("symbol")
    @classmethod
    def _in_capitals(cls, symbol: str) -> str:
        return symbol.upper()


class SymbolNameView(View):
    """A name and its meaning, and who gave it."""

    name: str
    symbol: str
    actor: str | None = Field(description="Null for users: operators are named to operators only.")
    at: datetime


class SymbolNameList(View):
    """All names that operators gave, by name."""

    symbols: list[SymbolNameView]


@router.get("/symbols", summary="List names of symbols")
async def list_symbol_names(call: Call) -> SymbolNameList:
    """Names that operators gave to symbols for signals,
    besides those that every installation understands."""
    rows = await call.database.fetch(symbol_names.list_names)
    shown = [SymbolNameView.model_validate(row) for row in rows]
    if not call.caller.staff:
        shown = [view.model_copy(update={"actor": None}) for view in shown]
    return SymbolNameList(symbols=shown)


@router.put(
    "/symbols/{name}", summary="Name a symbol", responses=problems.responses(errors.InvalidRequest)
)
async def put_symbol_name(name: Name, body: SymbolNameRequest, call: Call) -> SymbolNameView:
    """Gives a name its meaning, for signals that come from now on;
    those that came before keep theirs."""
    row = await call.database.write(
        symbol_names.put_name, name.upper(), body.symbol, actor=call.actor
    )
    return SymbolNameView.model_validate(row)


@router.delete(
    "/symbols/{name}",
    status_code=204,
    summary="Forget a name",
    responses=problems.responses(errors.NotFound),
)
async def delete_symbol_name(name: Name, call: Call) -> Response:
    """From now on signals with this name mean what they mean without the table."""
    if not await call.database.write(symbol_names.delete_name, name.upper(), actor=call.actor):
        raise errors.NotFound
    return Response(status_code=204)
