"""The fields of symbol names in requests and answers."""

from datetime import datetime

from pydantic import Field, field_validator

from api.http.fields import Body, View


class SymbolNameRequest(Body):
    """Says what a name means."""

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
