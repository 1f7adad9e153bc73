"""Counts how many tags an account has used on a day: their numbers follow the clock, and do not
tell."""

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.execute("alter table order_tags add column used bigint not null default 0")
    # At least as many as there were. Earlier days are read by nobody.
    op.execute("update order_tags set used = last where trading_day >= current_date - 1")
