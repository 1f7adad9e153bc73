"""The tables. Times are UTC; a user's secret is here as ciphertext only."""

from __future__ import annotations

import uuid
from datetime import date, datetime
from decimal import Decimal
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Date,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    LargeBinary,
    Numeric,
    String,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB,
        Decimal: Numeric(18, 6),
        bytes: LargeBinary,
    }


class User(Base):
    __tablename__ = "users"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    #: The last epoch given out to a worker of this user; it only grows.
    epoch: Mapped[int] = mapped_column(BigInteger, server_default="0")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ApiKey(Base):
    __tablename__ = "api_keys"
    __table_args__ = (CheckConstraint("role in ('user', 'operator', 'admin')", name="api_keys_role"),)

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    #: SHA-256 of a random 256-bit token, hex. A fast hash is right for a key that nobody can guess.
    key_hash: Mapped[str] = mapped_column(String(64), unique=True)
    prefix: Mapped[str] = mapped_column(String(16))
    role: Mapped[str] = mapped_column(String(16))
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.id"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    revoked_at: Mapped[datetime | None]


class BrokerAccount(Base):
    __tablename__ = "broker_accounts"

    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    account_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    broker: Mapped[str] = mapped_column(String(32))
    broker_type: Mapped[str] = mapped_column(String(32))
    simulation: Mapped[bool]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class StoredCredentials(Base):
    __tablename__ = "credentials"
    __table_args__ = (
        ForeignKeyConstraint(
            ["user_id", "account_id"], ["broker_accounts.user_id", "broker_accounts.account_id"]
        ),
    )

    user_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    account_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    #: Grows with each change, so that a worker rebuilds only what changed.
    version: Mapped[int]
    ciphertext: Mapped[bytes]
    nonce: Mapped[bytes]
    wrapped_key: Mapped[bytes]
    master_key_id: Mapped[str] = mapped_column(String(128))
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Order(Base):
    __tablename__ = "orders"
    __table_args__ = (
        ForeignKeyConstraint(
            ["user_id", "account_id"], ["broker_accounts.user_id", "broker_accounts.account_id"]
        ),
        UniqueConstraint("user_id", "client_order_id", name="orders_client_order_id"),
        UniqueConstraint("user_id", "account_id", "trading_day", "tag", name="orders_tag"),
        CheckConstraint("quantity > 0", name="orders_quantity"),
        Index("orders_by_user", "user_id", "created_at"),
        Index("orders_by_state", "state", "updated_at"),
        Index("orders_by_change", "user_id", "changed"),
        # What may stand in the way of a user's next order, asked for with each one. `orders_by_state` leads
        # to all that were submitting since the last vacuum: 6 to 16 ms after 20,000 orders.
        Index(
            "orders_unsettled",
            *("user_id", "account_id"),
            postgresql_where=text("state in ('unknown', 'submitting')"),
        ),
        Index("orders_to_verify", "verify_at", postgresql_where=text("verify_at is not null")),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(String(64))
    account_id: Mapped[str] = mapped_column(String(64))
    client_order_id: Mapped[str] = mapped_column(String(64))
    #: SHA-256 of what was asked, so that a repeat with another body is seen.
    fingerprint: Mapped[str] = mapped_column(String(64))
    symbol: Mapped[str] = mapped_column(String(32))
    side: Mapped[str] = mapped_column(String(8))
    quantity: Mapped[int]
    price_type: Mapped[str] = mapped_column(String(8))
    price: Mapped[Decimal | None]
    time_in_force: Mapped[str] = mapped_column(String(8))
    #: The only id of ours that the broker keeps, 6 characters: two for the day, four for the order's number
    #: on it (`orders.py`).
    tag: Mapped[str] = mapped_column(String(6))
    trading_day: Mapped[date] = mapped_column(Date)
    state: Mapped[str] = mapped_column(String(16))
    reason_code: Mapped[str | None] = mapped_column(String(64))
    reason: Mapped[str | None]
    broker_order_id: Mapped[str | None] = mapped_column(String(64))
    filled_quantity: Mapped[int] = mapped_column(server_default="0")
    average_price: Mapped[Decimal | None]
    #: Valkey's generation when the order was accepted.
    generation: Mapped[str] = mapped_column(String(64))
    deadline_at: Mapped[datetime]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    updated_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: It can only make a position smaller: passes a switch that says REDUCING.
    reduce_only: Mapped[bool] = mapped_column(server_default=text("false"))
    #: What was asked of us, when that was more than this order: a reversal, a webhook, a closed position.
    origin: Mapped[str] = mapped_column(String(64), server_default="")
    #: When the sweeper has to look at it; none once it is final or followed by its workflow.
    verify_at: Mapped[datetime | None] = mapped_column(
        server_default=text("clock_timestamp() + interval '2 seconds'")
    )
    #: Why a person has to look at it; none: nobody has to. The state stays what is known of the order.
    attention: Mapped[str | None]
    attention_at: Mapped[datetime | None]
    #: The transaction that changed it last, as far as it is shown; kept by a trigger (`order_changes.py`).
    changed: Mapped[int] = mapped_column(
        BigInteger, server_default=text("cast(cast(pg_current_xact_id() as text) as bigint)")
    )


class OrderTag(Base):
    """The last number given out for an account on a trading day."""

    __tablename__ = "order_tags"

    user_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    account_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    trading_day: Mapped[date] = mapped_column(Date, primary_key=True)
    last: Mapped[int] = mapped_column(BigInteger)


class OrderEventRow(Base):
    __tablename__ = "order_events"
    __table_args__ = (Index("order_events_by_order", "order_id", "at"),)

    event_id: Mapped[str] = mapped_column(String(160), primary_key=True)
    order_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("orders.id"))
    state: Mapped[str] = mapped_column(String(16))
    #: When it happened, by the clock of the process that saw it.
    at: Mapped[datetime]
    data: Mapped[dict[str, Any]]
    recorded_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class WorkerSession(Base):
    """One assignment of a worker to a user: where its epoch comes from."""

    __tablename__ = "worker_sessions"
    __table_args__ = (
        UniqueConstraint("user_id", "epoch", name="worker_sessions_epoch"),
        Index("worker_sessions_by_worker", "worker_id"),
        # The crashes of one user, for the claim that looks at them.
        Index("worker_sessions_crashed", "user_id", "ended_at", postgresql_where=text("crashed")),
        # All workers in service, for the watcher: a small part of a table that only grows.
        Index(
            "worker_sessions_open",
            "claim_id",
            postgresql_where=text("ended_at is null and worker_id is not null"),
        ),
        # All claims that are not over, with or without a worker, for maintenance.
        Index("worker_sessions_unended", "user_id", postgresql_where=text("ended_at is null")),
        # The claims of a pool's last minutes: its size may follow them.
        Index("worker_sessions_by_claim_time", "pool", "claimed_at"),
    )

    claim_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    epoch: Mapped[int] = mapped_column(BigInteger)
    pool: Mapped[str] = mapped_column(String(64))
    worker_id: Mapped[str | None] = mapped_column(String(128))
    task_id: Mapped[str | None] = mapped_column(String(256))
    warm: Mapped[bool | None]
    assigned_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    claimed_at: Mapped[datetime | None]
    connected_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    end_reason: Mapped[str | None]
    #: It died in service, or could not get its broker back; `ended_at` is the time of that.
    crashed: Mapped[bool] = mapped_column(server_default=text("false"))


class WorkerTransition(Base):
    """One change of state in the life of a user's worker, as its workflow noted it.

    No foreign key on the user: the workflow of a user who does not exist has a timeline, too.
    """

    __tablename__ = "worker_transitions"
    __table_args__ = (
        UniqueConstraint("chain", "number", name="worker_transitions_number"),
        Index("worker_transitions_by_user", "user_id", "id"),
    )

    #: Grows in the order of commits within one user's rows: a reader may go on behind the last it has seen.
    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    user_id: Mapped[str] = mapped_column(String(64))
    #: The first run's id of a chain of runs; within it, `number` grows by one.
    chain: Mapped[str] = mapped_column(String(128))
    number: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[datetime]
    before: Mapped[str] = mapped_column(String(32))
    after: Mapped[str] = mapped_column(String(32))
    reason: Mapped[str]
    worker_id: Mapped[str] = mapped_column(String(128))
    epoch: Mapped[int] = mapped_column(BigInteger)
    #: Until when the new state may last; none for the last one.
    deadline: Mapped[datetime | None]
    recorded_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class MaintenancePass(Base):
    """One pass over all workers: what it saw, what two looks have seen, and what came of it."""

    __tablename__ = "maintenance_passes"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    began_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: Valkey's generation and the id of its process; empty: it could not be read.
    generation: Mapped[str] = mapped_column(String(64))
    server: Mapped[str] = mapped_column(String(64))
    #: Tasks that the launcher listed.
    tasks: Mapped[int]
    #: Boot of the host, and seconds since then.
    boot: Mapped[str] = mapped_column(String(64))
    boottime: Mapped[float]
    #: Workers that were looked at.
    scanned: Mapped[int]
    scan_seconds: Mapped[float]
    #: Why nothing may be done; empty: it may.
    guarded: Mapped[str] = mapped_column(String(64))
    #: Anomaly → how many.
    found: Mapped[dict[str, Any]]
    suspects: Mapped[list[Any]] = mapped_column(JSONB)
    confirmed: Mapped[list[Any]] = mapped_column(JSONB)
    #: What was done → how often.
    outcomes: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    finished_at: Mapped[datetime | None]

    @property
    def total_seconds(self) -> float | None:
        """Seconds of the scan and of what followed; None while the pass runs."""
        if self.finished_at is None:
            return None
        return (self.finished_at - self.began_at).total_seconds() + self.scan_seconds


class AuditEntry(Base):
    """Append-only: a trigger refuses UPDATE and DELETE. No secret in it."""

    __tablename__ = "audit_trail"
    __table_args__ = (Index("audit_trail_by_subject", "subject", "id"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    actor: Mapped[str] = mapped_column(String(128))
    action: Mapped[str] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(String(160))
    data: Mapped[dict[str, Any]]
