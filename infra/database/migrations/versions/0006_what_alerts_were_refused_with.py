"""What alerts were refused with, and an index of an account's comparisons"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("webhook_deliveries", sa.Column("refused", sa.String(300), nullable=True))
    op.create_index("reconciliations_by_account", "reconciliations", ["user_id", "account_id"])


def downgrade() -> None:
    op.drop_index("reconciliations_by_account", table_name="reconciliations")
    op.drop_column("webhook_deliveries", "refused")
