"""New users begin above the epochs that a restored database has forgotten."""

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.execute("create sequence epoch_floor minvalue 0 start 0")
