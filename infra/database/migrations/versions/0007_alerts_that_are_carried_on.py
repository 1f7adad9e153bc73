"""What an alert asked for, until when it may be carried out, and who is at it"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("webhook_deliveries", sa.Column("alert", JSONB, nullable=True))
    op.add_column("webhook_deliveries", sa.Column("until", sa.DateTime(timezone=True), nullable=True))
    op.add_column("webhook_deliveries", sa.Column("held_until", sa.DateTime(timezone=True), nullable=True))
    op.create_index(
        "webhook_deliveries_under_way",
        "webhook_deliveries",
        ["held_until"],
        postgresql_where=sa.text("held_until is not null"),
    )


def downgrade() -> None:
    op.drop_index("webhook_deliveries_under_way", table_name="webhook_deliveries")
    for name in ("held_until", "until", "alert"):
        op.drop_column("webhook_deliveries", name)
