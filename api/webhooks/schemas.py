"""Webhooks, and the signals that come to them: what they say, and what identifies them."""

import codecs
import json
import math
import re
import unicodedata
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from hashlib import sha256
from typing import Annotated, Any, Self
from uuid import UUID

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from api.http.errors import InvalidRequest
from api.http.fields import AccountId, Body, PlainText, View, plain_price, with_examples
from api.http.problems import refusing_invalid
from api.orders.schemas import Lot, OpenCloseType, OrderView, special_terms
from api.positions.schemas import AnyCondition
from api.webhooks.planning import (
    EntryMode,
    OddLots,
    OrderNames,
    OrderPricing,
    PriceRounding,
    QuantityUnit,
    SignalAction,
    Wish,
)
from infra.database.trading.models import Webhook
from infra.networks import parse_network
from worker_runtime.protocol.messages import PriceType, TimeInForce
from worker_runtime.protocol.order_terms import OpenClose, OrderLot

#: Shares that one signal may be for: 10,000 lots, as an order's.
MAX_SIGNAL_QUANTITY = 10_000_000


def _network(text: str) -> str:
    return str(parse_network(text, strict=False))


_UNIT = (
    "What a signal's quantity counts where a lot has several units, as of stocks: `shares` or "
    "`lots`. Futures count contracts."
)
_ODD = (
    "Shares beyond full lots: `split` orders them as an odd lot, `refuse` refuses the signal, "
    "`round_down` leaves them out."
)
_MODE = (
    "`open`: an entry closes the other side, then opens its whole quantity. `delta`: both come out "
    "of its quantity, as TradingView's `{{strategy.order.contracts}}` counts it."
)
_ROUNDING = (
    "A limit price between two ticks: `safe` lowers a buy's and raises a sale's, "
    "`refuse` refuses it."
)


_EXPIRY = "After this time it takes no signals."


def _in_future(at: datetime | None) -> datetime | None:
    if at is not None and at <= datetime.now(UTC):
        raise ValueError("expires_at has passed")
    return at


StockUnit = Annotated[QuantityUnit, Field(json_schema_extra={"enum": ["shares", "lots"]})]


def _of_stocks(unit: QuantityUnit | None) -> None:
    if unit is QuantityUnit.CONTRACTS:
        raise ValueError("quantity_unit is shares or lots; futures count contracts without it")


class WebhookRequest(Body):
    """A new place to which signals may be posted."""

    account_id: AccountId
    quantity_unit: StockUnit | None = Field(
        default=None,
        description=f"{_UNIT} Required unless a lot of the account's market is one unit.",
    )
    odd: OddLots = Field(default=OddLots.REFUSE, description=_ODD)
    entry_mode: EntryMode = Field(default=EntryMode.OPEN, description=_MODE)
    price_rounding: PriceRounding = Field(default=PriceRounding.SAFE, description=_ROUNDING)
    sources: tuple[Annotated[str, Field(max_length=64), AfterValidator(_network)], ...] = Field(
        default=(), max_length=32, description="Addresses or networks that may post; empty: all."
    )
    window_s: int = Field(
        default=60,
        ge=1,
        le=3600,
        description="Seconds that a signal's own time may differ from ours.",
    )
    label: PlainText = Field(default="", max_length=128, description="What you call it.")
    expires_at: AwareDatetime | None = Field(default=None, description=_EXPIRY)

    @field_validator("expires_at")
    @classmethod
    def _expires_later(cls, at: datetime | None) -> datetime | None:
        return _in_future(at)

    @model_validator(mode="after")
    def _unit_is_of_stocks(self) -> Self:
        _of_stocks(self.quantity_unit)
        return self


class WebhookChange(Body):
    """Changes a webhook; fields that are left out stay. Giving `quantity_unit` confirms it."""

    quantity_unit: StockUnit | None = Field(default=None, description=_UNIT)
    odd: OddLots | None = Field(default=None, description=_ODD)
    entry_mode: EntryMode | None = Field(default=None, description=_MODE)
    price_rounding: PriceRounding | None = Field(default=None, description=_ROUNDING)
    label: PlainText | None = Field(default=None, max_length=128, description="What you call it.")
    expires_at: AwareDatetime | None = Field(
        default=None, description=f"{_EXPIRY} Left out, it stays; null: it does not end."
    )

    @field_validator("expires_at")
    @classmethod
    def _expires_later(cls, at: datetime | None) -> datetime | None:
        return _in_future(at)

    @model_validator(mode="after")
    def _something_changes(self) -> Self:
        _of_stocks(self.quantity_unit)
        if not self.model_dump(exclude_none=True) and "expires_at" not in self.model_fields_set:
            raise ValueError("name at least one setting to change")
        return self


class WebhookView(View):
    """A webhook, without what opens it."""

    id: UUID
    user_id: str
    account_id: str
    label: str = ""
    quantity_unit: QuantityUnit | None = Field(
        default=None,
        description=f"{_UNIT} Null of stocks: nobody has confirmed it, and quantities count lots.",
    )
    unit: QuantityUnit | None = Field(
        default=None,
        description="What a quantity counts: `quantity_unit`, or `contracts` where a lot of the "
        "account's market is one unit. Null: nobody has confirmed the unit.",
    )
    odd: OddLots = OddLots.REFUSE
    entry_mode: EntryMode = EntryMode.OPEN
    price_rounding: PriceRounding = PriceRounding.SAFE
    sources: list[str]
    window_s: int
    created_at: datetime
    expires_at: datetime | None = Field(default=None, description=_EXPIRY)
    paused_at: datetime | None = Field(default=None, description="Since when it takes no signals.")
    previous_secret_until: datetime | None = Field(
        default=None, description="Until then the secret before the last rotation counts, too."
    )
    made_by: UUID | None = Field(
        default=None, description="The API key that made it, where that is known."
    )
    revoked_at: datetime | None

    @classmethod
    def of(cls, webhook: Webhook, *, counts_contracts: bool) -> Self:
        view = cls.model_validate(webhook)
        unit = QuantityUnit.CONTRACTS if counts_contracts else view.quantity_unit
        return view.model_copy(update={"unit": unit})


class WebhookWithSecretsView(WebhookView):
    """A new webhook. Token and secret are shown this once."""

    token: str
    secret: str = Field(description="Goes into the body of every signal.")
    path: str = Field(description="Where signals are posted.")


class WebhookList(View):
    """A user's webhooks, the newest first."""

    webhooks: list[WebhookView]
    next_cursor: UUID | None = None


class SecretRotationRequest(Body):
    """Says how long the former secret is still accepted."""

    overlap_s: float = Field(
        default=86_400,
        ge=0,
        le=30 * 86_400,
        allow_inf_nan=False,
        description="Seconds; 0: it ends at once.",
    )


class RotatedWebhookView(WebhookView):
    """A webhook with its new secret, which is shown this once."""

    secret: str = Field(description="Goes into the body of every signal.")


#: Actions that open something, and so have to say how much.
_OPENS = frozenset(
    {SignalAction.BUY, SignalAction.SELL, SignalAction.LONG_ENTRY, SignalAction.SHORT_ENTRY}
)
_PLACEHOLDER = re.compile(r"\{\{\s*([^{}]{1,100}?)\s*\}\}")
#: In a text that is no JSON: with a colon it may be an object in double braces, which has a secret.
_RAW_PLACEHOLDER = re.compile(r"\{\{\s*([^{}:]{1,100}?)\s*\}\}")
#: One that is a whole value, without quotes or with quotes of its own (`plot("RSI")`).
_PLACEHOLDER_VALUE = re.compile(r'(:\s*)"?(\{\{[^{}:]{1,100}\}\})"?(?=\s*[,}])')
_NUMBER = re.compile(r"[+-]?\d{1,12}(?:\.\d{0,12})?")
#: How alerts write that there is no value: Pine's `na` becomes `NaN`.
_NO_VALUES = frozenset({"nan", "na", "n/a", "null", "none", "undefined"})
_SYMBOL = re.compile(r"[A-Za-z0-9./_:!-]+")
#: A text in JSON, and what it may have only escaped, such as a new line of a comment in Pine.
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_TYPOGRAPHIC_QUOTES = re.compile("[\u201c-\u201f\u00ab\u00bb\uff02]")


def _action_word(value: object) -> object:
    word = _lowered(value)
    if word in ("long", "short", "flat"):
        raise ValueError(
            f'{word} is a position: send it as "market_position", with "action": "position" and '
            '"position_size"'
        )
    return word


def _symbol_text(value: object) -> object:
    """Accepts a code of digits as a number, too: an alert may have {{ticker}} without quotes."""
    text = _number_as_text(value)
    if not isinstance(text, str):
        return text
    text = text.strip()
    if _SYMBOL.fullmatch(text) is None:
        usual = unicodedata.normalize("NFKC", text)
        hint = f"; did you mean {usual[:64]}?" if _SYMBOL.fullmatch(usual) is not None else ""
        raise ValueError(
            f"a symbol has letters A to Z, digits and . / _ : ! - and nothing else{hint}"
        )
    return text


def _number_as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _id_text(value: object) -> object:
    return "" if value is None else _number_as_text(value)


def _lowered(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _uppered(value: object) -> object:
    return value.strip().upper() if isinstance(value, str) else value


def _blank_is_none(value: object) -> object:
    return None if isinstance(value, str) and not value.strip() else _uppered(value)


def _price_types(value: object) -> object:
    """Accepts `market` and `limit`, too."""
    text = _uppered(value)
    return (
        {"MARKET": "MKT", "LIMIT": "LMT", "": "MKT"}.get(text, text)
        if isinstance(text, str)
        else text
    )


def _whole(value: object) -> object:
    """Accepts a quantity as TradingView writes it: as a number or as text, and 1 as `1.0`, too."""
    if isinstance(value, bool):
        raise ValueError("it is no number")
    no_value = isinstance(value, float) and math.isnan(value)
    if no_value or (isinstance(value, str) and value.strip().lower() in _NO_VALUES):
        raise ValueError(
            f"it is {str(value).strip()}: there was no value for it when the alert fired"
        )
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        text = value.strip()
        if not text:
            return None
        if _NUMBER.fullmatch(text) is None:
            raise ValueError("it is no number; write it as 150 or 150.0")
        number = Decimal(text)
        if number != number.to_integral_value():
            raise ValueError(
                "it is not whole: the exchange trades whole shares, lots and contracts"
            )
        return int(number)
    if isinstance(value, float):
        raise ValueError("it is not whole: the exchange trades whole shares, lots and contracts")
    return value


def _unfilled(place: str, placeholder: str) -> str:
    return (
        f"{place} still has the placeholder {{{{{placeholder}}}}}, which TradingView did not fill "
        "in: strategy placeholders work in alerts of strategies only, and they are case-sensitive"
    )


def _number_text(value: object) -> str | None:
    """Returns a price as its sender wrote it, to tell signals apart."""
    return (
        None if value is None or isinstance(value, bool | dict | list) else str(value).strip()[:32]
    )


def _usable_price(text: str | None) -> Decimal | None:
    try:
        price = Decimal(text or "")
    except InvalidOperation:
        return None
    return price if price.is_finite() and 0 < price < 10**9 else None


class Signal(BaseModel):
    """Describes a signal. Other fields are ignored: signals carry more than Berth needs."""

    model_config = ConfigDict(frozen=True, extra="ignore", json_schema_extra=with_examples)

    secret: str = Field(min_length=1, max_length=256, repr=False)
    time: AwareDatetime = Field(description="When the signal was sent, with a zone: `{{timenow}}`.")
    action: Annotated[SignalAction, BeforeValidator(_action_word)] = Field(
        description="In any case: an order, what a strategy wants, or the position it has."
    )
    symbol: Annotated[
        str,
        BeforeValidator(_symbol_text),
        Field(
            pattern=r"^[A-Za-z0-9./_:!-]+$",
            max_length=64,
            description="`{{ticker}}`, with or without `{{exchange}}:`; `2330`, `2330.TW`, "
            "`TXF1!`, `TXFL6`.",
        ),
    ]
    quantity: Annotated[
        Annotated[int, Field(strict=True, gt=0, le=MAX_SIGNAL_QUANTITY)] | None,
        BeforeValidator(_whole),
    ] = Field(
        default=None,
        description="In the unit of the webhook. `close` and exits without it close all of the "
        "position.",
    )
    position_size: Annotated[
        Annotated[int, Field(strict=True, ge=-MAX_SIGNAL_QUANTITY, le=MAX_SIGNAL_QUANTITY)] | None,
        BeforeValidator(_whole),
    ] = Field(
        default=None,
        description="With `position`: the position that the strategy has now, "
        "`{{strategy.position_size}}`;"
        " negative when short, 0 closes. Without a sign if `market_position` tells the side.",
    )
    market_position: Annotated[
        str,
        Field(pattern=r"^(long|short|flat|)$", description="`{{strategy.market_position}}`."),
        BeforeValidator(lambda value: "" if value is None else _lowered(value)),
    ] = ""
    reduce_only: bool = Field(
        default=False,
        strict=True,
        description="With `buy` and `sell`: close a position on the other side, of up to "
        "`quantity`.",
    )
    price_type: Annotated[PriceType, BeforeValidator(_price_types)] = PriceType.MARKET
    price: (
        Annotated[Decimal, Field(gt=0, max_digits=18, decimal_places=10, allow_inf_nan=False)]
        | None
    ) = Field(
        default=None,
        description="Of a limit order. With a market order it is for information only.",
    )
    time_in_force: Annotated[TimeInForce | None, BeforeValidator(_blank_is_none)] = Field(
        default=None,
        description="IOC for market orders and ROD for limit orders, unless it is given.",
    )
    lot: Lot = OrderLot.COMMON
    condition: AnyCondition = None
    open_close: OpenCloseType = OpenClose.AUTO
    id: Annotated[str, BeforeValidator(_id_text)] = Field(
        default="",
        max_length=128,
        pattern=r"^[^\x00]*$",  # PostgreSQL takes no NUL
        description="Tells signals apart that are otherwise the same, also in time.",
    )
    #: The price of a market signal as it was sent: for information, but it tells signals apart.
    quoted_price: str | None = Field(default=None, max_length=32)

    @model_validator(mode="before")
    @classmethod
    def _sets_information_apart(cls, words: Any) -> Any:
        if not isinstance(words, dict):
            raise ValueError("the message has to be one JSON object, {…}: an alert is one signal")
        words = {name: value for name, value in words.items() if name in cls.model_fields}
        if _price_types(words.get("price_type", "MKT")) != "LMT" and "price" in words:
            if (quoted := _number_text(words.pop("price"))) is not None:
                words["quoted_price"] = quoted
        elif isinstance(words.get("price"), str):
            words["price"] = words["price"].strip() or None
        unfilled = [
            (name, match[1])
            for name, value in words.items()
            if name not in ("secret", "quoted_price")
            and isinstance(value, str)
            and (match := _PLACEHOLDER.search(value))
        ]
        if unfilled:
            name, placeholder = unfilled[0]
            raise ValueError(_unfilled(name, placeholder))
        return words

    @model_validator(mode="after")
    def _fits_its_action(self) -> Self:
        if self.action in _OPENS and self.quantity is None:
            raise ValueError(f"{self.action} needs a quantity")
        if self.reduce_only and self.action in (SignalAction.LONG_ENTRY, SignalAction.SHORT_ENTRY):
            raise ValueError("an entry cannot be reduce_only: it opens a position")
        if self.reduce_only and self.action is SignalAction.POSITION:
            raise ValueError(
                "position cannot be reduce_only: it may open a position; close and the exits "
                "only reduce one"
            )
        if self.price_type is PriceType.LIMIT and self.price is None:
            raise ValueError("a limit order needs a price")
        if self.action is SignalAction.POSITION:
            self._check_target()
        return self

    def _check_target(self) -> None:
        size, side = self.position_size, self.market_position
        if size is None and side != "flat":
            raise ValueError(
                "position needs position_size: {{strategy.position_size}}, or 0 to close"
            )
        if size is None:
            return
        if (side == "flat" and size) or (side == "long" and size < 0):
            raise ValueError(
                f"position_size {size} and market_position {side} contradict each other"
            )
        if side in ("long", "short") and size == 0:
            raise ValueError(f"position_size 0 and market_position {side} contradict each other")

    @property
    def target(self) -> int | None:
        """The position that the signal asks for; negative when short."""
        if self.action is not SignalAction.POSITION:
            return None
        size = self.position_size or 0
        return -abs(size) if self.market_position == "short" else size

    @property
    def wish(self) -> Wish:
        return Wish(
            action=self.action,
            quantity=self.quantity,
            target=self.target,
            reduce_only=self.reduce_only,
        )

    @property
    def plain(self) -> bool:
        """An order as it stands, whatever the positions are."""
        return self.wish.is_plain

    @property
    def pricing(self) -> OrderPricing:
        limit = self.price_type is PriceType.LIMIT
        return OrderPricing(
            price_type=self.price_type,
            price=self.price,
            time_in_force=self.time_in_force or (TimeInForce.ROD if limit else TimeInForce.IOC),
            lot=self.lot,
            condition=self.condition,
            open_close=self.open_close,
            quoted=_usable_price(self.quoted_price),
        )

    def digest(self, webhook: Webhook) -> str:
        """Return what identifies the signal:
        made of what it says as it was sent, never of what it means.

        It is that of earlier releases for all that they understood.
        """
        said: list[Any] = [
            str(webhook.id),
            f"{self.time.timestamp():.6f}",
            self.action.value,
            self.symbol,
            "" if self.quantity is None else self.quantity,
            self.price_type,
            plain_price(self.price),
            self.time_in_force or "",
            self.id,
        ]
        said += special_terms(self.lot, self.condition, self.open_close)
        if self.reduce_only:  # only then, so that digests from before this field stay the same
            said.append("reduce_only")
        if self.action is SignalAction.POSITION:
            said += ["position", self.target]
        if self.quoted_price:
            said += ["quoted", self.quoted_price]
        # As a list: no value can pass for a part of the next one.
        return sha256(json.dumps(said).encode()).hexdigest()

    def client_order_id(self, digest: str) -> str:
        # An intent's id has at most 48 characters, because its orders' ids are longer.
        return f"webhook-{digest[: 48 if self.plain else 40]}"

    def names(self, digest: str) -> OrderNames:
        """Returns the ids of its orders, the same that the release before gave them."""
        name = self.client_order_id(digest)
        if self.plain:
            return OrderNames(close=name, open=name)
        if self.action is SignalAction.CLOSE or self.reduce_only:
            return OrderNames(close=name, open=f"{name}.open")
        return OrderNames(close=f"{name}.close", open=f"{name}.open")


class SignalOutcome(View):
    """Says how far a signal has come that is more than one plain order."""

    client_order_id: str
    action: SignalAction
    legs: list[OrderView] = Field(description="Its orders so far, closing ones first.")
    complete: bool = Field(description="False: it continues without the caller.")
    outcome: str | None = Field(
        default=None,
        description="`placed`, `rejected` (by the broker), `nothing_to_close`, or `nothing_to_do` "
        "(the position is what it should be).",
    )
    reason: str | None = Field(
        default=None,
        description="A sentence about the outcome; while it waits: what is in its way.",
    )
    signal_id: int | None = Field(default=None, description="Its number among the webhook's calls.")
    symbol: str | None = Field(default=None, description="The contract or share that it means.")
    unit: QuantityUnit | None = None
    quantity: int | None = Field(default=None, description="In that unit.")


@refusing_invalid("body")
def parse_signal(body: bytes) -> Signal:
    """Return the signal of a call's text. Raises `InvalidRequest`.

    A placeholder that was not filled in is read as if it stood in quotes, so that it is named with
    its field, or ignored where its value is for information only. New lines and tabs in a text are
    read as if they were escaped: comments of a strategy may have them.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        signal = Signal.model_validate_json(body)
    except ValidationError as error:
        if not _is_no_json(error):
            raise
        body, fault = _mended(body), error.errors(include_input=False)[0]["msg"]
        try:
            signal = Signal.model_validate_json(body)
        except ValidationError as second:
            if not _is_no_json(second):
                raise
            text = body.decode("utf-8", "replace")
            placeholder = _RAW_PLACEHOLDER.search(text)
            if placeholder is not None:
                raise InvalidRequest(_unfilled("the message", placeholder[1])) from None
            raise InvalidRequest(_json_fault(text, fault)) from None
    _refuse_contradictions(body)
    return signal


def _mended(body: bytes) -> bytes:
    """Returns a text that is no JSON with its unfilled placeholders in quotes and its control
    characters escaped, where nothing else can be meant."""
    text = body.decode("utf-8", "replace")
    if _RAW_PLACEHOLDER.search(text) is not None:
        text = _PLACEHOLDER_VALUE.sub(lambda match: match[1] + json.dumps(match[2]), text)

    def escaped(match: re.Match[str]) -> str:
        return _CONTROL.sub(lambda control: f"\\u{ord(control[0]):04x}", match[0])

    return _JSON_TEXT.sub(escaped, text).encode()


def _json_fault(text: str, fault: str) -> str:
    """Says what keeps a message from being JSON, and what to do about it, without showing it."""
    fault = fault.removeprefix("Invalid JSON: ")
    if not text.lstrip().startswith(("{", "[")):
        advice = "it begins with { and ends with }"
    elif fault.startswith("key must be a string") and _TYPOGRAPHIC_QUOTES.search(text):
        advice = 'write straight quotes (") and not typographic ones'
    elif fault.startswith("key must be a string"):
        advice = 'write names and texts in double quotes (")'
    elif fault.startswith("trailing characters"):
        advice = "something is behind its object, and an alert is one signal"
    elif fault.startswith("trailing comma"):
        advice = "take the last comma away"
    elif fault.startswith("expected `,`"):
        advice = "a comma is missing, or a text has a double quote in it"
    else:
        advice = 'write each text and placeholder in double quotes, as "symbol": "{{ticker}}"'
    return f"the message is not JSON ({fault}): {advice}"


def _refuse_contradictions(body: bytes) -> None:
    """Raises `InvalidRequest` for a message that has a field twice with different values: JSON does
    not say which of them counts."""
    pairs: list[tuple[str, Any]] = []
    with suppress(ValueError, RecursionError):  # it was read, so this is not about its fields
        pairs = json.loads(body, object_pairs_hook=list)
    values: dict[str, str] = {}
    for name, value in pairs:
        if name in Signal.model_fields and values.setdefault(name, repr(value)) != repr(value):
            raise InvalidRequest(f"the message has {name} twice, with different values")


def _is_no_json(error: ValidationError) -> bool:
    return error.errors(include_input=False)[0]["type"] == "json_invalid"


@refusing_invalid("body")
def stored_signal(words: dict[str, Any]) -> Signal:
    """Return a signal as it was stored, without its secret."""
    return Signal.model_validate(words | {"secret": "-"})


def actor_of(webhook: Webhook) -> str:
    return f"webhook:{webhook.id}"
