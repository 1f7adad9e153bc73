"""Bodies and views of instruments, of the accounts that list them, and of changed lots."""

from datetime import date, datetime
from typing import Literal

from pydantic import Field

from api.http.fields import ID_PATTERN, Body, LongReason, Price, View
from worker_runtime.protocol.instruments import InstrumentKind

#: The form of a broker's name, and of a market's.
NAME_PATTERN = r"^[a-z][a-z0-9_]{0,15}$"


class PriceStepView(View):
    """A step of prices."""

    below: Price | None = Field(description="Prices below this one; null: the last step.")
    tick: Price


class InstrumentView(View):
    """Describes an instrument as its broker listed it last. Prices are in the currency of its
    market."""

    broker: str
    code: str = Field(description="What orders name it by.")
    name: str
    market: str = Field(description="As `broker_type` of the accounts that trade it.")
    kind: InstrumentKind
    lot_units: int = Field(description="Units (shares, contracts) in a common lot.")
    lot_value: Price = Field(description="Value of one common lot at a price of 1.")
    ticks: list[PriceStepView] = Field(
        description="By rising price. Empty: the broker does not say, so its record decides."
    )
    reference: Price | None = Field(description="The price from which the limits count.")
    limit_up: Price | None
    limit_down: Price | None
    expires_on: date | None = Field(description="The last day on which it trades; null: none.")
    day_trade: bool | None = Field(
        description="May be bought and sold on one day; null: the broker does not say."
    )
    underlying: str = Field(description="What a derivative follows; may be empty.")
    loaded_on: date = Field(
        description="The trading day of this list. The reference price and the limits are of this "
        "day."
    )
    listed: bool = Field(description="false: the broker no longer lists it.")


class InstrumentPageView(View):
    """Instruments, by broker and code."""

    instruments: list[InstrumentView]
    next_cursor: str | None = Field(description="`after` of the next page; null on the last page.")


class InstrumentSourceRequest(Body):
    """The account through which a broker's instruments are listed."""

    user_id: str = Field(
        pattern=ID_PATTERN,
        max_length=64,
        description="A user who does nothing else: one with orders, a webhook or an API key that "
        "may place orders is refused.",
        examples=["instruments"],
    )
    account_id: str = Field(pattern=ID_PATTERN, max_length=64, examples=["9A95-0123456"])


class InstrumentLoadView(View):
    """Describes an attempt to load a broker's list."""

    trading_day: date
    state: Literal["running", "loaded", "refused", "failed"] = Field(
        description="`refused`: the list was empty, much smaller than before, or had a value that "
        "cannot be. `failed`: there was no list to be had."
    )
    began_at: datetime
    ended_at: datetime | None
    instruments: int
    added: int
    removed: int = Field(description="Known instruments that are no longer listed.")
    pending: int = Field(description="Changed lots that waited for an operator.")
    prices_due: bool = Field(
        description="The broker did not have the prices of the day yet, so the list has none of "
        "most instruments of a kind, and is loaded again."
    )
    error: str


class InstrumentSourceView(View):
    """An account through which a broker's instruments are loaded, or were."""

    broker: str
    market: str = Field(description="`broker_type` of the account.")
    user_id: str | None = Field(description="null: no account is designated any more.")
    account_id: str | None
    account_removed: bool = Field(
        description="The designated account was removed, so the list is loaded no more. Designate "
        "another one, or delete the source."
    )
    set_by: str | None
    set_at: datetime | None
    loaded_on: date | None = Field(
        description="The trading day of the list in force, the oldest one if the account lists "
        "several markets; null: none was loaded, and the broker's record says what symbols mean."
    )
    missed_days: int | None = Field(
        description="Trading days of the broker since that list; above 2 is an alert."
    )
    last_load: InstrumentLoadView | None


class InstrumentSourceList(View):
    """All accounts that list instruments, or did, by broker and market."""

    sources: list[InstrumentSourceView]


class LoadInstrumentsRequest(Body):
    """A load now."""

    accept_smaller: bool = Field(
        default=False,
        description="Put the list in force also if it has less than half of the instruments of the "
        "list before. It counts for the next attempt alone: if that one gets no list, ask again.",
    )
    market: str | None = Field(
        default=None,
        pattern=NAME_PATTERN,
        description="Only through the account of this market; null: of all markets.",
        examples=["futures"],
    )


class LoadsBegunView(View):
    """Loads that have begun, or are being tried again."""

    broker: str
    trading_day: date
    workflow_ids: list[str] = Field(
        description="Their ids in Temporal: a load through the account of each market."
    )


class InstrumentChangeView(View):
    """A lot that differs from the known one: of the instrument, or of the product or the broker's
    record where the instrument is new. Until an operator has approved it, orders are checked with
    the old one."""

    id: int
    broker: str
    code: str
    old_lot_units: int
    old_lot_value: Price
    new_lot_units: int
    new_lot_value: Price
    since: date = Field(description="The trading day of the first list that had it.")
    found_at: datetime
    resolution: Literal["approved", "withdrawn"] | None = Field(
        description="`withdrawn`: a later list had the old lot again. null: it waits."
    )
    resolved_at: datetime | None
    resolved_by: str | None


class InstrumentChangeList(View):
    """Changed lots that wait for an operator, the oldest first."""

    changes: list[InstrumentChangeView]


class ApproveChangeRequest(Body):
    """Somebody has made sure that the lot has changed."""

    reason: LongReason = Field(min_length=1)
