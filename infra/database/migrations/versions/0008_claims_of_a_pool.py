"""An index of a pool's claims by their time, for the demand that its size follows"""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("worker_sessions_by_claim_time", "worker_sessions", ["pool", "claimed_at"])


def downgrade() -> None:
    op.drop_index("worker_sessions_by_claim_time", table_name="worker_sessions")
