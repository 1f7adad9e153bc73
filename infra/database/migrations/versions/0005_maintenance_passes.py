"""Maintenance: its passes, and an index of the claims that are not over"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "maintenance_passes",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column(
            "began_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("generation", sa.String(64), nullable=False),
        sa.Column("server", sa.String(64), nullable=False),
        sa.Column("tasks", sa.Integer(), nullable=False),
        sa.Column("boot", sa.String(64), nullable=False),
        sa.Column("boottime", sa.Float(), nullable=False),
        sa.Column("scanned", sa.Integer(), nullable=False),
        sa.Column("scan_seconds", sa.Float(), nullable=False),
        sa.Column("guarded", sa.String(64), nullable=False),
        sa.Column("found", postgresql.JSONB(), nullable=False),
        sa.Column("suspects", postgresql.JSONB(), nullable=False),
        sa.Column("confirmed", postgresql.JSONB(), nullable=False),
        sa.Column("outcomes", postgresql.JSONB(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "worker_sessions_unended",
        "worker_sessions",
        ["user_id"],
        postgresql_where=sa.text("ended_at is null"),
    )


def downgrade() -> None:
    op.drop_index("worker_sessions_unended", table_name="worker_sessions")
    op.drop_table("maintenance_passes")
