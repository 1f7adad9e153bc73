"""Tables around trading: switches, limits, differences from the broker's books, webhooks."""

import uuid
from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Identity, Index, String, func, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from infra.database.models import Base, of_account


class Switch(Base):
    """The trading switch of one scope that was ever set. The strictest of a user's switches counts."""

    __tablename__ = "switches"
    __table_args__ = (CheckConstraint("state in ('open', 'reducing', 'halted')", name="switches_state"),)

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


class OrderTwin(Base):
    """The last order that asked for the same: what two equal orders at once meet in. Of no use after a crash,
    so it is not logged."""

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
        Index("reconciliations_open", "user_id", "account_id", postgresql_where=text("resolved_at is null")),
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
    """An address to which alerts may be posted for one account. Only hashes of its secrets are stored."""

    __tablename__ = "webhooks"
    __table_args__ = (of_account(),)

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    #: SHA-256 of the token in the path, hex.
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    #: SHA-256 of the secret in the body, hex. Both are random and long, so a fast hash will do.
    secret_hash: Mapped[str] = mapped_column(String(64))
    user_id: Mapped[str] = mapped_column(String(64))
    account_id: Mapped[str] = mapped_column(String(64))
    #: Addresses or networks that may post; empty means all.
    sources: Mapped[list[str]] = mapped_column(ARRAY(String(64)), server_default="{}")
    #: Seconds that an alert's own time may differ from ours.
    window_s: Mapped[int] = mapped_column(server_default=text("60"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    revoked_at: Mapped[datetime | None]


class WebhookAlert(Base):
    """An alert that was received, kept so that a replay of it is recognised."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index("webhook_deliveries_by_time", "at"),
        Index("webhook_deliveries_under_way", "held_until", postgresql_where=text("held_until is not null")),
    )

    webhook_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    #: SHA-256 of what identifies the alert, hex.
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    order_id: Mapped[uuid.UUID | None]
    #: Code and message of the error that refused it before it became an order.
    refused: Mapped[str | None] = mapped_column(String(300))
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: The alert without its secret.
    alert: Mapped[dict[str, Any] | None]
    #: It is given up after this time.
    until: Mapped[datetime | None]
    #: The lease of the process that carries it out; null: there is nothing more to do.
    held_until: Mapped[datetime | None]
