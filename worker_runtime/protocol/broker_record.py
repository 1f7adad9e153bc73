"""What is known of a broker: a record, which is data next to its adapter.

A record is a TOML file (`broker.toml`). It says what the broker's markets take, when they are open,
what a login needs and what the broker limits. Pre-trade checks, rate limits, the API's validation
and the documents read it; no other code knows a broker by name. `installed_brokers.py` finds
records; nothing is imported for them.

Times of day are local to the market. Quantities are in the lot's own unit. Prices are in the
market's currency.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import StrEnum
from functools import cached_property
from itertools import product
from math import isfinite
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec

from worker_runtime.protocol.errors import BerthError, OrderTermsRule, PriceTypeRule
from worker_runtime.protocol.launch import BrokerLimits
from worker_runtime.protocol.order_terms import (
    ODD_LOTS,
    SHARES_PER_LOT,
    OpenClose,
    OrderCondition,
    OrderLot,
    PriceType,
    TimeInForce,
)

#: The schema of records that this release reads.
SCHEMA_VERSION = 1
#: Characters of the tag that each order has. A broker that kept fewer of them would list different
#: orders under one tag.
TAG_LENGTH = 6

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,15}$")]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class BrokerRecordRefused(BerthError, code="BROKER_RECORD_REFUSED"):
    """A broker's record cannot be used: the sentence names the file and what is wrong with it.
    Correct the record, or uninstall the plug-in, then start again."""


class RecordPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The base of all parts: a misspelt key is refused."""


class CredentialKind(StrEnum):
    """What an API takes for a field of credentials."""

    TEXT = "text"
    SECRET = "secret"  # noqa: S105 - a kind
    FILE = "file"


class CountedPer(StrEnum):
    """Whose calls a broker counts together."""

    PERSON = "person"
    KEY = "key"
    ACCOUNT = "account"


class QuantityChange(StrEnum):
    """What the number in a quantity change means to the broker."""

    NEW_TOTAL = "new_total"
    REDUCE_BY = "reduce_by"
    #: Nobody knows before somebody has seen one (`berth broker check`).
    CONFIRM = "confirm"
    UNSUPPORTED = "unsupported"


class TradingHours(RecordPart, frozen=True, kw_only=True):
    """A session of a trading day. An evening that closes before it opens ends on the next day, any
    other one on its own."""

    #: When orders are taken.
    opens: time
    closes: time
    #: When matching begins.
    bell: time

    @property
    def ends_next_day(self) -> bool:
        return self.closes < self.opens


class LotRule(RecordPart, frozen=True, kw_only=True):
    """A kind of lot: what one of it is, and how many an order may have."""

    #: Units (shares, contracts) in one; 1: an order counts units.
    units: Count
    min_quantity: Count = 1
    max_quantity: Count
    #: Minutes after the day's close from which on, and until when, it is taken; None: with the
    #: market.
    after_close_min: tuple[int, int] | None = None
    #: Whether it is taken from the bell on, and not when the market begins to take orders.
    from_bell: bool = False


class OrderRule(RecordPart, frozen=True, kw_only=True):
    """Terms that may be combined: each with each."""

    lots: tuple[OrderLot, ...] = (OrderLot.COMMON,)
    price_types: tuple[PriceType, ...]
    times_in_force: tuple[TimeInForce, ...]
    conditions: tuple[OrderCondition, ...] = (OrderCondition.CASH,)
    open_close: tuple[OpenClose, ...] = (OpenClose.AUTO,)
    #: Where it is written, for the sentence that refuses an order.
    source: str = ""


class TickStep(RecordPart, frozen=True, kw_only=True):
    """The step of prices below a price; the last step of a table has no end."""

    below: Decimal | None = None
    tick: Decimal


class SymbolRule(RecordPart, frozen=True, kw_only=True):
    """Symbols of one form, until the broker's own instruments say more."""

    pattern: str
    #: Value of one common lot at a price of 1, in the market's currency; None: the symbol does not
    #: tell, so without the broker's instruments an order's value is not checked.
    lot_value: Decimal | None = None
    ticks: tuple[TickStep, ...] = ()


class FinalSettlement(RecordPart, frozen=True, kw_only=True):
    """The last day of a contract month: a weekday of a week of the month, or the next trading
    day. The products have a contract for each month."""

    #: 0: Monday.
    weekday: Annotated[int, msgspec.Meta(ge=0, le=6)]
    #: Which one of the month, from 1 on.
    week: Annotated[int, msgspec.Meta(ge=1, le=4)]
    #: Until when the contracts trade on that day.
    closes: time
    #: A pattern of the products that end so; '': all.
    products: str = ""


class ContractCodes(RecordPart, frozen=True, kw_only=True):
    """How a market's derivatives are named: a product, then what `rolling` or `dated` describes.

    The patterns are used by Python and by PostgreSQL: groups have no names.
    """

    #: Of the product's code, with which the symbols of its contracts begin.
    product: str
    #: Of the rest of a code that stands for a contract which only the broker knows, such as the one
    #: that ends first; '': there are no such codes.
    rolling: str = ""
    #: Of the rest of a single contract's code.
    dated: str
    #: The codes of the months, from January on, and how many of the year's last digits follow.
    #: Empty: names of charts (`TXF1!`) are not translated.
    months: str = ""
    year_digits: Annotated[int, msgspec.Meta(ge=1, le=4)] = 1
    final_settlement: FinalSettlement | None = None


class ChartNames(RecordPart, frozen=True, kw_only=True):
    """How charting programs name a market's symbols."""

    #: Exchanges that may stand before a symbol (`NASDAQ:AAPL`).
    exchanges: tuple[str, ...] = ()
    #: Endings that may follow one (`2330.TW`).
    suffixes: tuple[str, ...] = ()
    #: Names for the sentence that refuses an unknown one.
    examples: tuple[str, ...] = ()


class MarketRule(RecordPart, frozen=True, kw_only=True):
    """A market, as its accounts trade it."""

    title: str
    zone: str
    #: ISO 4217.
    currency: Annotated[str, msgspec.Meta(pattern=r"^[A-Z]{3}$")]
    #: Holidays: a JSON file next to the record (`holidays`, `last`); '': every weekday is a trading
    #: day.
    holidays: str = ""
    day: TradingHours
    evening: TradingHours | None = None
    lots: dict[OrderLot, LotRule]
    orders: tuple[OrderRule, ...]
    symbols: tuple[SymbolRule, ...]
    #: Of a market with derivatives.
    contracts: ContractCodes | None = None
    charts: ChartNames = ChartNames()
    #: What `berth broker check` orders unless told otherwise: cheap, and traded every day.
    check_symbol: str = ""
    #: How far a price may be from the day's reference price; None: without a limit.
    daily_limit: Decimal | None = None

    @cached_property
    def _combinations(self) -> frozenset[tuple[str, ...]]:
        return frozenset(
            tuple(map(str, terms))
            for rule in self.orders
            for terms in product(
                rule.lots,
                rule.price_types,
                rule.times_in_force,
                rule.conditions,
                rule.open_close,
            )
        )

    @property
    def lot_units(self) -> int:
        """Units in a common lot; 1 where the market has none."""
        common = self.lots.get(OrderLot.COMMON)
        return 1 if common is None else common.units

    @cached_property
    def _symbols(self) -> list[tuple[re.Pattern[str], SymbolRule]]:
        return [(re.compile(rule.pattern), rule) for rule in self.symbols]

    def takes(
        self,
        lot: str,
        price_type: str,
        time_in_force: str,
        condition: str,
        open_close: str,
    ) -> bool:
        """Return True if the market takes these terms together. No I/O: a look-up in a set."""
        return (lot, price_type, time_in_force, condition, open_close) in self._combinations

    def refusal(
        self,
        lot: str,
        price_type: str,
        time_in_force: str,
        condition: str,
        open_close: str,
    ) -> BerthError | None:
        """Return why the market does not take these terms together; None if it does."""
        if self.takes(lot, price_type, time_in_force, condition, open_close):
            return None
        rules: Iterable[OrderRule] = self.orders
        terms: tuple[tuple[str, str, str, type[BerthError]], ...] = (
            ("lots", "lot", lot, OrderTermsRule),
            ("price_types", "price type", price_type, PriceTypeRule),
            ("times_in_force", "time in force", time_in_force, PriceTypeRule),
            ("conditions", "condition", condition, OrderTermsRule),
            ("open_close", "open or close type", open_close, OrderTermsRule),
        )
        so_far: list[str] = []
        for name, title, value, kind in terms:
            matching = [rule for rule in rules if value in getattr(rule, name)]
            if not matching:
                possible = sorted({str(other) for rule in rules for other in getattr(rule, name)})
                sources = sorted({rule.source for rule in rules if rule.source})
                with_terms = f" with {', '.join(so_far)}" if so_far else ""
                source = f" ({'; '.join(sources)})" if sources else ""
                return kind(
                    f"{self.title} takes no {title} `{value}`{with_terms}. Possible here: "
                    f"{', '.join(possible)}{source}."
                )
            rules = matching
            so_far.append(f"{title} `{value}`")
        return OrderTermsRule(f"{self.title} does not take these terms together.")

    def symbol_rule(self, symbol: str) -> SymbolRule | None:
        """Return the rule of the first pattern that fits the symbol."""
        return next((rule for form, rule in self._symbols if form.fullmatch(symbol)), None)

    def tick(self, symbol: str, price: Decimal) -> Decimal | None:
        """Return the smallest step of a price; None if the record does not know it."""
        rule = self.symbol_rule(symbol)
        if rule is None:
            return None
        return next(
            (step.tick for step in rule.ticks if step.below is None or price < step.below), None
        )


class ListCoverage(RecordPart, frozen=True, kw_only=True):
    """What a list of orders proves at most. An adapter may prove less at times, and says so with
    each list; what it says beyond the record does not count."""

    #: Whether a list has the orders of all sessions; with a simulation's own value if it differs.
    all_sessions: bool
    all_sessions_in_simulation: bool
    #: Orders younger than this may be missing.
    lag_s: Seconds
    #: How far back lists reach: `day` for a day at most, `always`.
    reach: Annotated[str, msgspec.Meta(pattern="^(day|always)$")] = "day"
    #: Whether positions that are asked for after a list include its fills.
    positions_agree: bool = False


class AddressLimits(RecordPart, frozen=True, kw_only=True):
    """The broker's limits of all calls from one outgoing address, whoever makes them. None: not
    limited, or not published."""

    connections: Count | None = None
    logins_per_day: Count | None = None
    orders_per_10s: Count | None = None
    queries_per_5s: Count | None = None


class CallLimits(RecordPart, frozen=True, kw_only=True):
    """The broker's limits."""

    counted_per: CountedPer
    connections: Count
    logins_per_day: Count
    orders_per_10s: Count
    queries_per_5s: Count
    #: When the day of `logins_per_day` begins, UTC.
    day_begins: time = time()
    #: Seconds of a pause that the broker asks for, at least: where its answer asks for less, this
    #: counts. Nobody logs in during a pause.
    cool_down_s: Seconds = 0.0
    #: Limits of an outgoing address; each user behind it has a share of them.
    address: AddressLimits | None = None

    @property
    def day_begins_ms(self) -> int:
        """Milliseconds from midnight UTC."""
        begins = self.day_begins
        return ((begins.hour * 60 + begins.minute) * 60 + begins.second) * 1000

    def as_limits(self) -> BrokerLimits:
        return BrokerLimits(
            connections=self.connections,
            logins_per_day=self.logins_per_day,
            orders_per_10s=self.orders_per_10s,
            queries_per_5s=self.queries_per_5s,
        )

    def address_persons(self) -> dict[str, float]:
        """Return how many persons' calls the broker takes from an address, by the kind of call, as
        `SealedAccount.address_shares` names them; without the kinds that it does not limit."""
        if self.address is None:
            return {}
        numbers = {
            "connections": (self.address.connections, self.connections),
            "logins": (self.address.logins_per_day, self.logins_per_day),
            "orders": (self.address.orders_per_10s, self.orders_per_10s),
            "queries": (self.address.queries_per_5s, self.queries_per_5s),
        }
        return {
            kind: of_address / of_person
            for kind, (of_address, of_person) in numbers.items()
            if of_address is not None
        }


class SessionLife(RecordPart, frozen=True, kw_only=True):
    """When the broker ends a session by itself. None: it does not, or nobody knows when."""

    #: Seconds from the login on. The worker logs in anew before, in a quiet moment.
    life_s: Annotated[float, msgspec.Meta(ge=10)] | None = None
    #: A time of day, UTC, at which the broker ends all sessions. The worker logs in anew after it.
    ends_at: time | None = None


class CredentialField(RecordPart, frozen=True, kw_only=True):
    """A field of the credentials."""

    title: str
    kind: CredentialKind = CredentialKind.SECRET
    #: `always`, `live` (not in simulation), or `never`.
    needed: Annotated[str, msgspec.Meta(pattern="^(always|live|never)$")] = "always"
    max_length: Count = 512


#: The words of the keys that take one of a few.
_WORDS: Mapping[str, Iterable[str]] = {
    "conditions": OrderCondition,
    "counted_per": CountedPer,
    "kind": CredentialKind,
    "lots": OrderLot,
    "open_close": OpenClose,
    "price_types": PriceType,
    "quantity_change": QuantityChange,
    "times_in_force": TimeInForce,
}

#: Fields that credentials can have (`messages.Credentials`).
CREDENTIAL_FIELDS = ("api_key", "secret_key", "person_id", "ca_certificate", "ca_password")


class BrokerRecord(RecordPart, frozen=True, kw_only=True):
    """All that is known of a broker. `version` grows with each change of its content."""

    schema: int
    name: Name
    title: str
    version: Count
    #: `package.module:Class`; imported in a session process only, and called as `AdapterFactory`
    #: says.
    adapter: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    #: Whether the adapter or its SDK may write to standard output or error, perhaps a part of a
    #: secret: then both are closed in its process.
    adapter_prints: bool = True
    #: True for the exchange that comes with Berth, whose address and limits are settings of the
    #: installation.
    is_paper_exchange: bool = False
    #: False for a broker at which no account trades for real.
    trades_live: bool
    has_simulation: bool
    #: Characters of our tag that the broker keeps and lists; at least `TAG_LENGTH`.
    tag_length: Count
    quantity_change: QuantityChange
    #: Markets by the `broker_type` of their accounts.
    markets: dict[Name, MarketRule]
    lists: ListCoverage
    limits: CallLimits
    session: SessionLife = SessionLife()
    credentials: dict[str, CredentialField]
    #: How the API tries credentials without a login: `line` (see `credential_check.py`), or '' for
    #: not.
    credential_check: Annotated[str, msgspec.Meta(pattern="^(line)?$")] = ""
    #: What only a person with an account can confirm.
    unconfirmed: tuple[str, ...] = ()

    def has_market(self, broker_type: str) -> bool:
        """Return True if the broker has this market. Release 0.1.0 stored accounts of any type, and
        the paper exchange takes their orders."""
        return broker_type in self.markets or self.is_paper_exchange

    def market(self, broker_type: str) -> MarketRule:
        """Return the market of an account; the first one if its type is not in the record
        (`has_market`)."""
        return self.markets.get(broker_type) or next(iter(self.markets.values()))

    def needed_credentials(self, *, simulation: bool) -> list[str]:
        """Return the names of the fields that an account must have."""
        return [
            name
            for name, field in self.credentials.items()
            if field.needed == "always" or (field.needed == "live" and not simulation)
        ]


class HolidayTable(msgspec.Struct, frozen=True, kw_only=True):
    """Weekdays without trading, and the last day that the table knows."""

    holidays: frozenset[date]
    last: date
    source: str = ""


class Plugin(NamedTuple):
    """A broker that is installed: its record, and the distribution that brought it."""

    record: BrokerRecord
    #: Name and version of the distribution; '': it came with Berth.
    distribution: str = ""
    release: str = ""
    #: By market; a market without a table is not in it.
    holidays: Mapping[str, HolidayTable] = MappingProxyType({})

    @property
    def announced(self) -> str:
        """Return what a worker announces: `name=version of the record`, with the distribution if it
        is one of its own."""
        origin = f"@{self.distribution}-{self.release}" if self.distribution else ""
        return f"{self.record.name}={self.record.version}{origin}"


def read_record(text: str, *, where: str, included: Callable[[str], str]) -> BrokerRecord:
    """Read a record. `included` returns the text of a file next to it. Raises
    `BrokerRecordRefused`."""
    import tomllib

    try:
        content = tomllib.loads(text)
        shared, own = content.pop("markets_from", None), content.get("markets", {})
        if not isinstance(shared, str | None) or not isinstance(own, dict):
            raise ValueError("markets_from names a file, and markets are tables ([markets.NAME])")
        if shared is not None:
            content["markets"] = tomllib.loads(included(shared)) | own
        if content.get("schema") != SCHEMA_VERSION:
            raise ValueError(
                f"schema is {content.get('schema')!r}, and this release of Berth reads "
                f"{SCHEMA_VERSION}"
            )
        record = msgspec.convert(
            content, BrokerRecord, builtin_types=(time, date), strict=False, str_keys=True
        )
        _check(record)
    except Exception as error:  # the boundary to a file that others wrote
        raise BrokerRecordRefused(
            f"The broker record {where} cannot be used: {error}{_possible_words(str(error))}"
        ) from None
    return record


def _possible_words(error: str) -> str:
    """Return the words that a key takes, for msgspec's sentence about one that it does not take;
    '' for other errors."""
    place = re.search(r"Invalid enum value .*?(\w+)(\[[\d.]*\])*`$", error)
    words = _WORDS.get(place[1]) if place else None
    return f". Possible: {', '.join(words)}" if words else ""


def read_holidays(text: str, *, where: str) -> HolidayTable:
    """Read a table of holidays. Raises `BrokerRecordRefused`."""
    try:
        table = msgspec.json.decode(text, type=HolidayTable)
        if table.holidays and (latest := max(table.holidays)) > table.last:
            raise ValueError(f"{latest} is after `last`, which is {table.last}")
    except Exception as error:  # the boundary to a file that others wrote
        raise BrokerRecordRefused(
            f"The table of holidays {where} cannot be used: {error}"
        ) from None
    return table


def _check(record: BrokerRecord) -> None:
    """Raise `ValueError` for what the types allow and nobody can trade with."""
    if not record.markets:
        raise ValueError("it has no market")
    for unknown in record.credentials.keys() - set(CREDENTIAL_FIELDS):
        raise ValueError(
            f"credentials.{unknown}: Berth stores {', '.join(CREDENTIAL_FIELDS)}, and nothing else"
        )
    if record.tag_length < TAG_LENGTH:
        raise ValueError(
            f"tag_length is {record.tag_length}, and Berth's tags have {TAG_LENGTH} characters:"
            " what is cut off would make different orders look the same"
        )
    _require_local("limits.day_begins", record.limits.day_begins)
    if record.session.ends_at is not None:
        _require_local("session.ends_at", record.session.ends_at)
    for place, seconds in (
        ("session.life_s", record.session.life_s or 0.0),
        ("lists.lag_s", record.lists.lag_s),
        ("limits.cool_down_s", record.limits.cool_down_s),
    ):
        if not isfinite(seconds):
            raise ValueError(f"{place} is {seconds}; write a number of seconds")
    for name, market in record.markets.items():
        _check_market(name, market)


def _require_local(place: str, *times: time) -> None:
    for at in times:
        if at.tzinfo is not None:
            raise ValueError(f"{place} has the time {at}; write it without an offset")


def _require_positive(place: str, *numbers: Decimal | None) -> None:
    for number in numbers:
        if number is not None and not (number.is_finite() and number > 0):
            raise ValueError(f"{place} has the number {number}; write one above 0")


def _check_market(name: str, market: MarketRule) -> None:
    if not market.orders:
        raise ValueError(f"markets.{name}.orders: no order could be placed")
    _require_positive(f"markets.{name}.daily_limit", market.daily_limit)
    day = market.day
    for session, hours in (("day", day), ("evening", market.evening)):
        if hours is not None:
            _require_local(f"markets.{name}.{session}", hours.opens, hours.bell, hours.closes)
    if not day.opens <= day.bell < day.closes:
        raise ValueError(
            f"markets.{name}.day: it opens at {day.opens}, the bell is at {day.bell}, and it closes"
            f" at {day.closes}. Write them in this order; hours past midnight are an `evening`"
        )
    if market.evening is not None:
        _check_evening(name, day, market.evening)
    for number, rule in enumerate(market.orders):
        if not all((rule.lots, rule.price_types, rule.times_in_force)):
            raise ValueError(
                f"markets.{name}.orders[{number}]: lots, price_types and times_in_force have at"
                " least one word each"
            )
        for lot in rule.lots:
            if lot not in market.lots:
                raise ValueError(
                    f"markets.{name}.lots.{lot} is missing, and an order rule names it"
                )
    for symbol in market.symbols:
        try:
            re.compile(symbol.pattern)
        except re.error as error:
            raise ValueError(
                f"markets.{name}.symbols: {symbol.pattern!r} is no pattern: {error}"
            ) from None
        _require_positive(
            f"markets.{name}.symbols: {symbol.pattern!r}",
            symbol.lot_value,
            *(number for step in symbol.ticks for number in (step.below, step.tick)),
        )
        bounds = [step.below for step in symbol.ticks]
        ends = [bound for bound in bounds if bound is not None]
        if bounds and bounds != [*sorted(set(ends)), None]:
            raise ValueError(
                f"markets.{name}.symbols: the ticks of {symbol.pattern!r} must rise by "
                "`below`, and only the last one has none"
            )
    if market.contracts is not None:
        _check_contracts(name, market.contracts)
    _check_odd_lots(name, market)
    for lot, lot_rule in market.lots.items():
        if lot_rule.min_quantity > lot_rule.max_quantity:
            raise ValueError(f"markets.{name}.lots.{lot}: min_quantity is above max_quantity")
        _check_after_close(f"markets.{name}.lots.{lot}", day, lot_rule)


def _check_evening(name: str, day: TradingHours, evening: TradingHours) -> None:
    in_order = evening.opens <= evening.bell
    if not in_order or (not evening.ends_next_day and evening.bell >= evening.closes):
        raise ValueError(
            f"markets.{name}.evening: it opens at {evening.opens}, the bell is at {evening.bell},"
            f" and it closes at {evening.closes}. Write them in this order; only `closes` may be on"
            " the next morning"
        )
    if evening.opens < day.closes or (evening.ends_next_day and evening.closes > day.opens):
        raise ValueError(
            f"markets.{name}.evening: {evening.opens} to {evening.closes} overlaps the day, which"
            f" is {day.opens} to {day.closes}. It begins after the day's close and ends before the"
            " next day opens"
        )


def _check_after_close(place: str, day: TradingHours, rule: LotRule) -> None:
    if rule.after_close_min is None:
        return
    first, last = rule.after_close_min
    closes_min = day.closes.hour * 60 + day.closes.minute
    if not 0 <= first < last or closes_min + last >= 24 * 60:
        raise ValueError(
            f"{place}.after_close_min: {first} to {last} minutes after {day.closes} is no time of"
            " that day. Write when it begins, then when it ends"
        )


def _check_odd_lots(name: str, market: MarketRule) -> None:
    """Checks the odd lots: positions are split into full lots and the rest by one number
    (`SHARES_PER_LOT`)."""
    odd = [lot for lot in market.lots if lot in ODD_LOTS]
    if not odd:
        return
    common = market.lots.get(OrderLot.COMMON)
    if common is None or common.units != SHARES_PER_LOT:
        raise ValueError(
            f"markets.{name}.lots.{odd[0]}: odd lots are for markets whose common lot has"
            f" {SHARES_PER_LOT} units"
        )
    if any(market.lots[lot].units != 1 for lot in odd):
        raise ValueError(f"markets.{name}.lots.{odd[0]}: an odd lot counts single units")


def _check_contracts(name: str, contracts: ContractCodes) -> None:
    for field in ("product", "rolling", "dated"):
        pattern = getattr(contracts, field)
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(
                f"markets.{name}.contracts.{field}: {pattern!r} is no pattern: {error}"
            ) from None
        if groups:
            raise ValueError(
                f"markets.{name}.contracts.{field}: {pattern!r} has a group; write (?:…)"
            )
    settlement = contracts.final_settlement
    if settlement is not None:
        _require_local(f"markets.{name}.contracts.final_settlement", settlement.closes)
        try:
            re.compile(settlement.products)
        except re.error as error:
            raise ValueError(
                f"markets.{name}.contracts.final_settlement.products: {settlement.products!r} is"
                f" no pattern: {error}"
            ) from None
    if contracts.months and (len(contracts.months) != 12 or settlement is None):
        raise ValueError(
            f"markets.{name}.contracts: months has twelve characters, and needs final_settlement"
        )


def terms_of(order: Any) -> tuple[str, str, str, str, str]:
    """Return the terms of an order in the order in which `MarketRule.takes` has them."""
    return (
        order.lot,
        order.price_type,
        order.time_in_force,
        order.condition,
        order.open_close,
    )


def after_close(rule: LotRule) -> tuple[timedelta, timedelta] | None:
    """Return from how long after the close until how long after it a lot is taken; None: with the
    market."""
    if rule.after_close_min is None:
        return None
    first, last = rule.after_close_min
    return timedelta(minutes=first), timedelta(minutes=last)
