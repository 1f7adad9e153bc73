"""An index of the orders that may stand in the way of their account's next one"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "orders_unsettled",
        "orders",
        ["user_id", "account_id"],
        postgresql_where=sa.text("state in ('unknown', 'submitting')"),
    )


def downgrade() -> None:
    op.drop_index("orders_unsettled", table_name="orders")
