"""Orders that are never lost: verification, attention, switches, limits, differences, webhooks"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_NOW = sa.text("clock_timestamp()")
_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.execute("create sequence switch_version as bigint")
    op.add_column(
        "orders", sa.Column("reduce_only", sa.Boolean(), server_default=sa.text("false"), nullable=False)
    )
    op.add_column("orders", sa.Column("origin", sa.String(length=64), server_default="", nullable=False))
    op.add_column("orders", sa.Column("verify_at", _TIME, nullable=True))
    op.execute(
        "update orders set verify_at = clock_timestamp()"
        " where state not in ('filled', 'cancelled', 'rejected', 'expired')"
    )
    op.alter_column("orders", "verify_at", server_default=sa.text("clock_timestamp() + interval '2 seconds'"))
    op.add_column("orders", sa.Column("attention", sa.String(), nullable=True))
    op.add_column("orders", sa.Column("attention_at", _TIME, nullable=True))
    op.create_index(
        "orders_to_verify", "orders", ["verify_at"], postgresql_where=sa.text("verify_at is not null")
    )
    op.create_table(
        "switches",
        sa.Column("scope", sa.String(length=160), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column(
            "version", sa.BigInteger(), server_default=sa.text("nextval('switch_version')"), nullable=False
        ),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("at", _TIME, server_default=_NOW, nullable=False),
        sa.PrimaryKeyConstraint("scope"),
        sa.CheckConstraint("state in ('open', 'reducing', 'halted')", name="switches_state"),
    )
    op.create_table(
        "account_limits",
        sa.Column("user_id", sa.String(length=64), nullable=False),
        sa.Column("account_id", sa.String(length=64), nullable=False),
        sa.Column("max_quantity", sa.Integer(), nullable=True),
        sa.Column("max_notional", sa.Numeric(18, 6), nullable=True),
        sa.Column("max_daily_orders", sa.Integer(), nullable=True),
        sa.Column("duplicate_window_s", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("user_id", "account_id"),
        sa.ForeignKeyConstraint(
            ["user_id", "account_id"], ["broker_accounts.user_id", "broker_accounts.account_id"]
        ),
    )
    op.create_table(
        "reconciliations",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("user_id", sa.String(length=64), nullable=False),
        sa.Column("account_id", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("at", _TIME, server_default=_NOW, nullable=False),
        sa.Column("differences", JSONB(), nullable=False),
        sa.Column("blocks", sa.Boolean(), nullable=False),
        sa.Column("resolved_at", _TIME, nullable=True),
        sa.Column("resolved_by", sa.String(length=128), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "reconciliations_open",
        "reconciliations",
        ["user_id", "account_id"],
        postgresql_where=sa.text("resolved_at is null"),
    )
    op.create_table(
        "webhooks",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("user_id", sa.String(length=64), nullable=False),
        sa.Column("account_id", sa.String(length=64), nullable=False),
        sa.Column("sources", ARRAY(sa.String(length=64)), server_default="{}", nullable=False),
        sa.Column("window_s", sa.Integer(), server_default="60", nullable=False),
        sa.Column("created_at", _TIME, server_default=_NOW, nullable=False),
        sa.Column("revoked_at", _TIME, nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("token_hash"),
        sa.ForeignKeyConstraint(
            ["user_id", "account_id"], ["broker_accounts.user_id", "broker_accounts.account_id"]
        ),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("webhook_id", sa.Uuid(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("order_id", sa.Uuid(), nullable=True),
        sa.Column("at", _TIME, server_default=_NOW, nullable=False),
        sa.PrimaryKeyConstraint("webhook_id", "digest"),
    )
    op.create_index("webhook_deliveries_by_time", "webhook_deliveries", ["at"])


def downgrade() -> None:
    for table in ("webhook_deliveries", "webhooks", "reconciliations", "account_limits", "switches"):
        op.drop_table(table)
    op.drop_index("orders_to_verify", table_name="orders")
    for column in ("attention_at", "attention", "verify_at", "origin", "reduce_only"):
        op.drop_column("orders", column)
    op.execute("drop sequence switch_version")
