"""A worker's whole life: its timeline, and which assignments ended by a crash"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "worker_transitions",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("user_id", sa.String(length=64), nullable=False),
        sa.Column("chain", sa.String(length=128), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("before", sa.String(length=32), nullable=False),
        sa.Column("after", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("worker_id", sa.String(length=128), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("deadline", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "recorded_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("chain", "number", name="worker_transitions_number"),
    )
    op.create_index("worker_transitions_by_user", "worker_transitions", ["user_id", "id"], unique=False)
    op.add_column(
        "worker_sessions",
        sa.Column("crashed", sa.Boolean(), server_default=sa.text("false"), nullable=False),
    )
    op.create_index(
        "worker_sessions_crashed",
        "worker_sessions",
        ["user_id", "ended_at"],
        unique=False,
        postgresql_where=sa.text("crashed"),
    )
    op.create_index(
        "worker_sessions_open",
        "worker_sessions",
        ["claim_id"],
        unique=False,
        postgresql_where=sa.text("ended_at is null and worker_id is not null"),
    )


def downgrade() -> None:
    op.drop_index("worker_sessions_open", table_name="worker_sessions")
    op.drop_index("worker_sessions_crashed", table_name="worker_sessions")
    op.drop_column("worker_sessions", "crashed")
    op.drop_index("worker_transitions_by_user", table_name="worker_transitions")
    op.drop_table("worker_transitions")
