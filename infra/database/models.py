"""The tables. Migrations make them (`infra/database/migrations`); a test holds both together.

Times are `timestamptz`, prices and quantities as in the messages: decimals and lots. Nothing secret stands
here in clear: API keys are hashes, credentials are ciphertext.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    String,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

#: `audit_trail` refuses every change of what stands in it; the first migration installs the trigger.
AUDIT_TRIGGER = "audit_trail_append_only"


class Role(StrEnum):
    """What an API key may do."""

    USER = "user"  # its own user only
    OPERATOR = "operator"  # every user's workers and orders, no credentials
    ADMIN = "admin"


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text,
        datetime: DateTime(timezone=True),
        bytes: LargeBinary,
        bool: Boolean,
        int: Integer,
        Decimal: Numeric(18, 6),
        dict[str, Any]: JSONB,
    }


class User(Base):
    """One trader. The id stands in Valkey's hash tags, so braces and `|` are refused."""

    __tablename__ = "users"
    __table_args__ = (CheckConstraint("id ~ '^[^{}|[:space:]]{1,128}$' AND id <> '-1'", name="id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    #: The last epoch given out; it only grows (invariant one-owner).
    epoch: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ApiKey(Base):
    """A key of the REST API. The key itself is shown once and stored nowhere."""

    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint("role IN ('user', 'operator', 'admin')", name="role"),
        CheckConstraint("role <> 'user' OR user_id IS NOT NULL", name="user"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    #: SHA-256 in hex of a random token of 256 bits: nothing to guess, so no slow hash is needed.
    key_hash: Mapped[str] = mapped_column(unique=True)
    #: The token's first characters, so that a person can tell keys apart.
    prefix: Mapped[str]
    role: Mapped[str]
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.id"), index=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    revoked_at: Mapped[datetime | None]


class BrokerAccount(Base):
    """One account at a broker."""

    __tablename__ = "broker_accounts"

    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    account_id: Mapped[str] = mapped_column(primary_key=True)
    broker: Mapped[str]
    broker_type: Mapped[str] = mapped_column(server_default="")
    simulation: Mapped[bool]
    #: Orders so far; the next order's tag is made of it. Never reset, so tags differ on every trading day.
    last_tag: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class StoredCredentials(Base):
    """An account's credentials as the vault encrypted them. One row an account: the newest version."""

    __tablename__ = "credentials"
    __table_args__ = (
        ForeignKeyConstraint(
            ["user_id", "account_id"], ["broker_accounts.user_id", "broker_accounts.account_id"]
        ),
    )

    user_id: Mapped[str] = mapped_column(primary_key=True)
    account_id: Mapped[str] = mapped_column(primary_key=True)
    #: Grows with every change; a worker rebuilds only sessions whose version changed.
    version: Mapped[int]
    ciphertext: Mapped[bytes]
    nonce: Mapped[bytes]
    wrapped_key: Mapped[bytes]
    master_key_id: Mapped[str] = mapped_column(index=True)
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Order(Base):
    """An order, written before it goes anywhere. `state` is one of `OrderState`."""

    __tablename__ = "orders"
    __table_args__ = (
        ForeignKeyConstraint(
            ["user_id", "account_id"], ["broker_accounts.user_id", "broker_accounts.account_id"]
        ),
        UniqueConstraint("user_id", "client_order_id"),
        # Reconciliation finds an order in the broker's list by its tag.
        Index("ix_orders_user_id_account_id_tag", "user_id", "account_id", "tag", unique=True),
        Index("ix_orders_user_id_created_at", "user_id", text("created_at DESC"), "id"),
        # Sweepers look only at what may still change: this index stays small.
        Index(
            "ix_orders_open",
            "deadline_at",
            postgresql_where=text("state NOT IN ('filled', 'cancelled', 'rejected', 'expired')"),
        ),
        CheckConstraint("quantity > 0", name="quantity"),
        CheckConstraint("filled_quantity >= 0", name="filled_quantity"),
    )

    id: Mapped[str] = mapped_column(Uuid(as_uuid=False), primary_key=True)
    user_id: Mapped[str]
    account_id: Mapped[str]
    client_order_id: Mapped[str]
    #: Hash of the request's body: the same client order id with another body is a client's mistake.
    fingerprint: Mapped[str]
    symbol: Mapped[str]
    side: Mapped[str]
    quantity: Mapped[int]
    price_type: Mapped[str]
    price: Mapped[Decimal | None]
    time_in_force: Mapped[str]
    tag: Mapped[str] = mapped_column(String(6))
    state: Mapped[str]
    #: Stable error code of a rejected order, and its sentence.
    reason_code: Mapped[str | None]
    reason: Mapped[str | None]
    broker_order_id: Mapped[str | None]
    filled_quantity: Mapped[int] = mapped_column(server_default=text("0"))
    average_price: Mapped[Decimal | None]
    #: Generation of Valkey under which the order was enqueued.
    generation: Mapped[str] = mapped_column(server_default="")
    deadline_at: Mapped[datetime]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class OrderEventRow(Base):
    """One change of an order. Repeats are dropped by `event_id`."""

    __tablename__ = "order_events"
    __table_args__ = (Index("ix_order_events_order_id_at", "order_id", "at"),)

    event_id: Mapped[str] = mapped_column(primary_key=True)
    order_id: Mapped[str] = mapped_column(Uuid(as_uuid=False), ForeignKey("orders.id"))
    state: Mapped[str]
    #: When it happened, by the clock of the process that saw it.
    at: Mapped[datetime]
    data: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
    recorded_at: Mapped[datetime] = mapped_column(server_default=func.now())


class WorkerSession(Base):
    """One assignment of a worker to a user: the row that gives the epoch."""

    __tablename__ = "worker_sessions"
    __table_args__ = (UniqueConstraint("user_id", "epoch"),)

    claim_id: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    epoch: Mapped[int] = mapped_column(BigInteger)
    pool: Mapped[str]
    worker_id: Mapped[str | None] = mapped_column(index=True)
    task_id: Mapped[str | None]
    warm: Mapped[bool | None]
    claimed_at: Mapped[datetime] = mapped_column(server_default=func.now())
    connected_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    end_reason: Mapped[str | None]


class AuditEntry(Base):
    """Who did what to whom. Append only, never a secret in it."""

    __tablename__ = "audit_trail"
    __table_args__ = (Index("ix_audit_trail_subject_id", "subject", "id"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    actor: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    data: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
