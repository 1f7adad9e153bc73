"""The first tables"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit_trail",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column(
            "at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=160), nullable=False),
        sa.Column("data", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("audit_trail_by_subject", "audit_trail", ["subject", "id"], unique=False)
    op.execute("""
        create function audit_trail_is_append_only() returns trigger language plpgsql as $$
        begin raise exception 'the audit trail is append-only'; end $$
    """)
    op.execute("""
        create trigger audit_trail_append_only before update or delete or truncate on audit_trail
        for each statement execute function audit_trail_is_append_only()
    """)
    op.create_table(
        "order_tags",
        sa.Column("user_id", sa.String(length=64), nullable=False),
        sa.Column("account_id", sa.String(length=64), nullable=False),
        sa.Column("trading_day", sa.Date(), nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "account_id", "trading_day"),
    )
    op.create_table(
        "users",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("prefix", sa.String(length=16), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("user_id", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("role in ('user', 'operator', 'admin')", name="api_keys_role"),
        sa.ForeignKeyConstraint(
            ["user_id"],
            ["users.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("key_hash"),
    )
    op.create_table(
        "broker_accounts",
        sa.Column("user_id", sa.String(length=64), nullable=False),
        sa.Column("account_id", sa.String(length=64), nullable=False),
        sa.Column("broker", sa.String(length=32), nullable=False),
        sa.Column("broker_type", sa.String(length=32), nullable=False),
        sa.Column("simulation", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["user_id"],
            ["users.id"],
        ),
        sa.PrimaryKeyConstraint("user_id", "account_id"),
    )
    op.create_table(
        "worker_sessions",
        sa.Column("claim_id", sa.String(length=128), nullable=False),
        sa.Column("user_id", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("pool", sa.String(length=64), nullable=False),
        sa.Column("worker_id", sa.String(length=128), nullable=True),
        sa.Column("task_id", sa.String(length=256), nullable=True),
        sa.Column("warm", sa.Boolean(), nullable=True),
        sa.Column(
            "assigned_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("claimed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("connected_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("end_reason", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["user_id"],
            ["users.id"],
        ),
        sa.PrimaryKeyConstraint("claim_id"),
        sa.UniqueConstraint("user_id", "epoch", name="worker_sessions_epoch"),
    )
    op.create_index("worker_sessions_by_worker", "worker_sessions", ["worker_id"], unique=False)
    op.create_table(
        "credentials",
        sa.Column("user_id", sa.String(length=64), nullable=False),
        sa.Column("account_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("ciphertext", sa.LargeBinary(), nullable=False),
        sa.Column("nonce", sa.LargeBinary(), nullable=False),
        sa.Column("wrapped_key", sa.LargeBinary(), nullable=False),
        sa.Column("master_key_id", sa.String(length=128), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["user_id", "account_id"],
            ["broker_accounts.user_id", "broker_accounts.account_id"],
        ),
        sa.PrimaryKeyConstraint("user_id", "account_id"),
    )
    op.create_table(
        "orders",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.String(length=64), nullable=False),
        sa.Column("account_id", sa.String(length=64), nullable=False),
        sa.Column("client_order_id", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("symbol", sa.String(length=32), nullable=False),
        sa.Column("side", sa.String(length=8), nullable=False),
        sa.Column("quantity", sa.Integer(), nullable=False),
        sa.Column("price_type", sa.String(length=8), nullable=False),
        sa.Column("price", sa.Numeric(precision=18, scale=6), nullable=True),
        sa.Column("time_in_force", sa.String(length=8), nullable=False),
        sa.Column("tag", sa.String(length=6), nullable=False),
        sa.Column("trading_day", sa.Date(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason_code", sa.String(length=64), nullable=True),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("broker_order_id", sa.String(length=64), nullable=True),
        sa.Column("filled_quantity", sa.Integer(), server_default="0", nullable=False),
        sa.Column("average_price", sa.Numeric(precision=18, scale=6), nullable=True),
        sa.Column("generation", sa.String(length=64), nullable=False),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.CheckConstraint("quantity > 0", name="orders_quantity"),
        sa.ForeignKeyConstraint(
            ["user_id", "account_id"],
            ["broker_accounts.user_id", "broker_accounts.account_id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("user_id", "account_id", "trading_day", "tag", name="orders_tag"),
        sa.UniqueConstraint("user_id", "client_order_id", name="orders_client_order_id"),
    )
    op.create_index("orders_by_state", "orders", ["state", "updated_at"], unique=False)
    op.create_index("orders_by_user", "orders", ["user_id", "created_at"], unique=False)
    op.create_table(
        "order_events",
        sa.Column("event_id", sa.String(length=160), nullable=False),
        sa.Column("order_id", sa.Uuid(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("data", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column(
            "recorded_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["order_id"],
            ["orders.id"],
        ),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_index("order_events_by_order", "order_events", ["order_id", "at"], unique=False)


def downgrade() -> None:
    op.drop_index("order_events_by_order", table_name="order_events")
    op.drop_table("order_events")
    op.drop_index("orders_by_user", table_name="orders")
    op.drop_index("orders_by_state", table_name="orders")
    op.drop_table("orders")
    op.drop_table("credentials")
    op.drop_index("worker_sessions_by_worker", table_name="worker_sessions")
    op.drop_table("worker_sessions")
    op.drop_table("broker_accounts")
    op.drop_table("api_keys")
    op.drop_table("users")
    op.drop_table("order_tags")
    op.drop_index("audit_trail_by_subject", table_name="audit_trail")
    op.drop_table("audit_trail")
    op.execute("drop function audit_trail_is_append_only()")
