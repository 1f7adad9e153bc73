"""Tables around trading: switches, limits, differences from the broker's books, webhooks."""

import uuid
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Date,
    ForeignKey,
    Identity,
    Index,
    String,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from infra.database.models import Base, by_time, of_account


class Switch(Base):
    """The trading switch of one scope that was ever set. The strictest of a user's switches
    counts."""

    __tablename__ = "switches"
    __table_args__ = (
        CheckConstraint("state in ('open', 'reducing', 'halted')", name="switches_state"),
    )

    #: `all`, `user:<user>` or `account:<user>:<account>`.
    scope: Mapped[str] = mapped_column(String(160), primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    #: Grows over all scopes: an older state never overwrites a newer one in Valkey.
    version: Mapped[int] = mapped_column(BigInteger)
    actor: Mapped[str] = mapped_column(String(128))
    reason: Mapped[str]
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class AccountLimits(Base):
    """The limits of one account; a null means that the settings' value holds."""

    __tablename__ = "account_limits"
    __table_args__ = (of_account(),)

    user_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    account_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    max_quantity: Mapped[int | None]
    max_notional: Mapped[Decimal | None]
    max_daily_orders: Mapped[int | None]
    #: Seconds.
    duplicate_window_s: Mapped[int | None]
    #: The share by which a price may differ from the reference price.
    price_band: Mapped[Decimal | None]


class QuantityChangeConfirmation(Base):
    """Stores what a quantity change was seen to mean at a broker, by version of its SDK, kind of
    lot and mode."""

    __tablename__ = "quantity_change_confirmations"
    __table_args__ = (
        CheckConstraint("meaning in ('reduce_by', 'new_total')", name="quantity_change_meaning"),
    )

    broker: Mapped[str] = mapped_column(String(32), primary_key=True)
    sdk_version: Mapped[str] = mapped_column(String(32), primary_key=True)
    lot: Mapped[str] = mapped_column(String(16), primary_key=True)
    futures: Mapped[bool] = mapped_column(primary_key=True)
    simulation: Mapped[bool] = mapped_column(primary_key=True)
    meaning: Mapped[str] = mapped_column(String(16))
    #: The broker's view before and after, without credentials.
    evidence: Mapped[dict[str, Any]]
    actor: Mapped[str] = mapped_column(String(128))
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class OrderDuplicate(Base):
    """The last order that asked for the same: what two equal orders at once meet in. Of no use
    after a crash, so it is not logged."""

    __tablename__ = "order_twins"
    __table_args__ = ({"prefixes": ["UNLOGGED"]},)

    user_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    client_order_id: Mapped[str] = mapped_column(String(64))
    at: Mapped[datetime]


class Reconciliation(Base):
    """The differences that one comparison of an account with the broker's books found."""

    __tablename__ = "reconciliations"
    __table_args__ = (
        Index(
            "reconciliations_open",
            "user_id",
            "account_id",
            postgresql_where=text("resolved_at is null"),
        ),
        # Each comparison reads the earlier ones of its account.
        Index("reconciliations_by_account", "user_id", "account_id"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    user_id: Mapped[str] = mapped_column(String(64))
    account_id: Mapped[str] = mapped_column(String(64))
    epoch: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    differences: Mapped[dict[str, Any]]
    #: New orders of the account are refused until a person has resolved it.
    blocks: Mapped[bool]
    resolved_at: Mapped[datetime | None]
    resolved_by: Mapped[str | None] = mapped_column(String(128))


class Webhook(Base):
    """An address to which signals may be posted for one account. Only hashes of its secrets are
    stored.

    The token hash of a webhook that this release made or changed is marked (`webhooks.MARK`), so
    the release before, which would take shares for lots and knows no pause, does not find it.
    """

    __tablename__ = "webhooks"
    __table_args__ = (
        of_account(),
        CheckConstraint("quantity_unit in ('shares', 'lots')", name="webhooks_quantity_unit"),
        CheckConstraint("odd in ('split', 'refuse', 'round_down')", name="webhooks_odd"),
        CheckConstraint("entry_mode in ('open', 'delta')", name="webhooks_entry_mode"),
        CheckConstraint("price_rounding in ('safe', 'refuse')", name="webhooks_price_rounding"),
        Index("webhooks_by_user", "user_id", "created_at", "id"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    #: SHA-256 of the token in the path, hex; perhaps marked.
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    #: SHA-256 of the secret in the body, hex. Both are random and long, so a fast hash will do.
    secret_hash: Mapped[str] = mapped_column(String(64))
    #: The secret before this one, which counts until `previous_secret_until`.
    previous_secret_hash: Mapped[str | None] = mapped_column(String(64))
    previous_secret_until: Mapped[datetime | None]
    user_id: Mapped[str] = mapped_column(String(64))
    account_id: Mapped[str] = mapped_column(String(64))
    #: The name that a person gives it.
    label: Mapped[str] = mapped_column(String(128), server_default="")
    #: Addresses or networks that may post; empty means all.
    sources: Mapped[list[str]] = mapped_column(ARRAY(String(64)), server_default="{}")
    #: Seconds that a signal's own time may differ from ours.
    window_s: Mapped[int] = mapped_column(server_default=text("60"))
    #: The unit of a signal's quantity for stocks; null: nobody has confirmed it, so it counts lots.
    quantity_unit: Mapped[str | None] = mapped_column(String(16))
    #: Says what becomes of shares beyond full lots.
    odd: Mapped[str] = mapped_column(String(16), server_default="refuse")
    #: `open`: an entry closes the other side and opens its quantity. `delta`: both come out of its
    #: quantity.
    entry_mode: Mapped[str] = mapped_column(String(16), server_default="open")
    #: Says what becomes of a limit price between two ticks: `safe` rounds a buy down and a sale up.
    price_rounding: Mapped[str] = mapped_column(String(16), server_default="safe")
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: The API key that made it; null for those of before.
    made_by: Mapped[uuid.UUID | None]
    #: It takes no signals after this time.
    expires_at: Mapped[datetime | None]
    #: It takes no signals for now.
    paused_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class WebhookCall(Base):
    """A call that came to a webhook: a signal and what became of it, or why it was none.

    Signals are a queue. For one account and `lane` they are carried out one at a time in the order
    of their ids, which is the order of their commits: a signal is inserted under the lane's
    advisory lock (`signals.add_signal`), so its id is drawn and committed before the next one's is
    drawn.

    States: `queued` (waits for its turn), `running` (a process holds the lease), and the final ones
    `done` (its orders rest or are final, or there was nothing to do) and `refused`. A call that
    never was a signal (wrong secret, garbage, a paused webhook) is `refused` and has no digest; of
    these a webhook keeps the last `signals.MAX_KEPT_REFUSALS`. A test's signal (`test`) never
    places anything.
    """

    __tablename__ = "webhook_calls"
    __table_args__ = (
        CheckConstraint(
            "state in ('queued', 'running', 'done', 'refused')", name="webhook_calls_state"
        ),
        Index("webhook_calls_by_webhook", "webhook_id", "id"),
        Index(
            "webhook_calls_digest",
            "webhook_id",
            "digest",
            unique=True,
            postgresql_where=text("digest is not null and not test"),
        ),
        Index(
            "webhook_calls_queue",
            "user_id",
            "account_id",
            "lane",
            "id",
            postgresql_where=text("completed_at is null"),
        ),
        by_time("webhook_calls_by_time", "received_at"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    webhook_id: Mapped[uuid.UUID]
    user_id: Mapped[str] = mapped_column(String(64))
    account_id: Mapped[str] = mapped_column(String(64))
    received_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: The address that posted it.
    source: Mapped[str] = mapped_column(String(64), server_default="")
    test: Mapped[bool] = mapped_column(server_default=text("false"))
    #: The body without its secret, cut to `signals.MAX_TEXT_LENGTH` characters; null if it
    #: cannot be read.
    body: Mapped[str | None]
    #: SHA-256 of what identifies the signal, hex: of the text as sent, never of what was made of
    #: it.
    digest: Mapped[str | None] = mapped_column(String(64))
    #: The signal as it was sent, without its secret.
    signal: Mapped[dict[str, Any] | None]
    #: The meaning of the signal when it came, stored before anything is placed: contract, unit,
    #: quantity in that unit.
    symbol: Mapped[str | None] = mapped_column(String(32))
    unit: Mapped[str | None] = mapped_column(String(16))
    quantity: Mapped[int | None]
    #: The webhook's settings when it came, and its orders once they are planned
    #: (`planning.SignalPlan`).
    settings: Mapped[dict[str, Any] | None]
    plan: Mapped[dict[str, Any] | None]
    #: The queue in which it waits: the symbol of a stock or an option, the product of a future.
    lane: Mapped[str | None] = mapped_column(String(32))
    state: Mapped[str] = mapped_column(String(16))
    #: It is not begun after this time, which counts from its receipt.
    deadline_at: Mapped[datetime | None]
    #: The lease of the run that carries it out, and that run's name.
    held_until: Mapped[datetime | None]
    held_by: Mapped[uuid.UUID | None]
    #: `placed`, `nothing_to_close`, `nothing_to_do`, or the code of an error.
    outcome: Mapped[str | None] = mapped_column(String(64))
    #: A sentence about the outcome; while it waits: what is in its way.
    reason: Mapped[str | None] = mapped_column(String(500))
    order_ids: Mapped[list[uuid.UUID]] = mapped_column(ARRAY(Uuid), server_default="{}")
    #: The number of times that the same signal came again.
    repeats: Mapped[int] = mapped_column(server_default=text("0"))
    #: Milliseconds from its receipt to the answer.
    answered_ms: Mapped[int | None]
    #: Its last order rests or is final, or it was refused.
    completed_at: Mapped[datetime | None]
    #: Its owner was told of its failure.
    notified_at: Mapped[datetime | None]


class SymbolName(Base):
    """A name that operators gave to a symbol, for signals: `FITX` for `TXF1!`."""

    __tablename__ = "symbol_names"

    #: As it comes in signals, in capitals.
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    #: A symbol, or one of the names that need no table (`infra.market.signal_symbols`).
    symbol: Mapped[str] = mapped_column(String(32))
    actor: Mapped[str] = mapped_column(String(128))
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class ToldInstrument:
    """The columns of what a broker tells of an instrument (`protocol.instruments.Instrument`)."""

    name: Mapped[str] = mapped_column(String(120), server_default="")
    market: Mapped[str] = mapped_column(String(16))
    kind: Mapped[str] = mapped_column(String(16))
    lot_units: Mapped[int]
    lot_value: Mapped[Decimal]
    #: `PriceStep`s as plain dicts.
    ticks: Mapped[list[Any]] = mapped_column(JSONB, server_default=text("'[]'"))
    reference: Mapped[Decimal | None]
    limit_up: Mapped[Decimal | None]
    limit_down: Mapped[Decimal | None]
    expires_on: Mapped[date | None] = mapped_column(Date)
    day_trade: Mapped[bool | None]
    underlying: Mapped[str] = mapped_column(String(32), server_default="")


class InstrumentRow(ToldInstrument, Base):
    """An instrument of a broker's list. Its lot is the one in force: a changed one is in
    `instrument_changes` until an operator has approved it."""

    __tablename__ = "instruments"
    __table_args__ = (
        Index("instruments_by_day", "loaded_on", postgresql_where=text("not listed")),
    )

    broker: Mapped[str] = mapped_column(String(32), primary_key=True)
    code: Mapped[str] = mapped_column(String(32, collation="C"), primary_key=True)
    #: The trading day of the last load that had it.
    loaded_on: Mapped[date] = mapped_column(Date)
    loaded_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: False: the broker no longer lists it.
    listed: Mapped[bool] = mapped_column(server_default=text("true"))


class InstrumentSource(Base):
    """The account through which a broker's instruments are loaded, one of each market. It stays
    until an operator deletes it: if the account is removed, operators hear that the list ages."""

    __tablename__ = "instrument_sources"

    broker: Mapped[str] = mapped_column(String(32), primary_key=True)
    #: The account's own. Whether it lists others, too, is the broker's affair.
    market: Mapped[str] = mapped_column(String(32), primary_key=True)
    user_id: Mapped[str] = mapped_column(String(64))
    account_id: Mapped[str] = mapped_column(String(64))
    set_by: Mapped[str] = mapped_column(String(128))
    set_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class InstrumentLoad(Base):
    """An attempt to load a broker's instruments.

    States: `running`, and the final ones `loaded` (its list is in force), `refused` (the list was
    empty, much smaller than before, or had a value that cannot be) and `failed` (no list was to be
    had).
    """

    __tablename__ = "instrument_loads"
    __table_args__ = (
        CheckConstraint(
            "state in ('running', 'loaded', 'refused', 'failed')", name="instrument_loads_state"
        ),
        Index("instrument_loads_by_broker", "broker", "id"),
        Index(
            "instrument_loads_loaded",
            "broker",
            "trading_day",
            postgresql_where=text("state = 'loaded'"),
        ),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    broker: Mapped[str] = mapped_column(String(32))
    #: That of the account that lists.
    market: Mapped[str] = mapped_column(String(32), server_default="")
    user_id: Mapped[str] = mapped_column(String(64))
    account_id: Mapped[str] = mapped_column(String(64))
    trading_day: Mapped[date] = mapped_column(Date)
    state: Mapped[str] = mapped_column(String(16))
    began_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    ended_at: Mapped[datetime | None]
    #: Those of the instruments in the list, which it puts in force and no others.
    markets: Mapped[list[str]] = mapped_column(ARRAY(String(16)), server_default="{}")
    #: Instruments in the list; of them, new ones and those that wait for an operator's yes.
    instruments: Mapped[int] = mapped_column(server_default=text("0"))
    added: Mapped[int] = mapped_column(server_default=text("0"))
    #: Known ones that are not in the list any more.
    removed: Mapped[int] = mapped_column(server_default=text("0"))
    pending: Mapped[int] = mapped_column(server_default=text("0"))
    #: The broker did not have the prices of the day yet: the list is loaded again.
    prices_due: Mapped[bool] = mapped_column(server_default=text("false"))
    #: Why it was refused or has failed.
    error: Mapped[str] = mapped_column(String(500), server_default="")


class StagedInstrument(ToldInstrument, Base):
    """An instrument of a load that is under way; no check reads it."""

    __tablename__ = "instrument_staging"

    load_id: Mapped[int] = mapped_column(
        ForeignKey("instrument_loads.id", ondelete="CASCADE"), primary_key=True
    )
    code: Mapped[str] = mapped_column(String(32, collation="C"), primary_key=True)


class InstrumentChange(Base):
    """An instrument's lot that differs from the one in force, for an operator. The one in force is
    that of lists before, or of the product or the record where the instrument is new.

    At most one of an instrument is open. `withdrawn`: a later list had the old lot again.
    """

    __tablename__ = "instrument_changes"
    __table_args__ = (
        CheckConstraint(
            "resolution in ('approved', 'withdrawn')", name="instrument_changes_resolution"
        ),
        Index(
            "instrument_changes_open",
            "broker",
            "code",
            unique=True,
            postgresql_where=text("resolved_at is null"),
        ),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    broker: Mapped[str] = mapped_column(String(32))
    code: Mapped[str] = mapped_column(String(32, collation="C"))
    old_lot_units: Mapped[int]
    old_lot_value: Mapped[Decimal]
    new_lot_units: Mapped[int]
    new_lot_value: Mapped[Decimal]
    #: The trading day of the first list that had it.
    since: Mapped[date] = mapped_column(Date)
    found_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    resolution: Mapped[str | None] = mapped_column(String(16))
    resolved_at: Mapped[datetime | None]
    resolved_by: Mapped[str | None] = mapped_column(String(128))


class WebhookDelivery(Base):
    """A signal as the release before this one records it. The release after this one drops the
    table.

    This release writes a row for each of its signals, too: refused, with a code that says to come
    again (`signals.BARRED`). So in a mixed fleet a process of the release before neither places a
    repeat by its own rules nor takes the signal over. What that release has promised this one
    carries on.
    """

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index("webhook_deliveries_by_time", "at"),
        Index(
            "webhook_deliveries_under_way",
            "held_until",
            postgresql_where=text("held_until is not null"),
        ),
    )

    webhook_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    #: SHA-256 of what identifies the signal, hex.
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    order_id: Mapped[uuid.UUID | None]
    #: Code and message of the error that refused it before it became an order.
    refused: Mapped[str | None] = mapped_column(String(300))
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: The signal without its secret.
    alert: Mapped[dict[str, Any] | None]
    #: It is given up after this time.
    until: Mapped[datetime | None]
    #: The lease of the process that carries it out; null: there is nothing more to do.
    held_until: Mapped[datetime | None]
