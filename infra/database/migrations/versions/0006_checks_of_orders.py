"""Duplicates are found by the statement that writes an order; an account has a price band of its
own."""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.execute(
        "create unlogged table order_twins (user_id varchar(64), fingerprint varchar(64), "
        "client_order_id varchar(64) not null, at timestamptz not null, primary key (user_id, "
        "fingerprint))"
    )
    op.execute("alter table account_limits add column price_band numeric(18, 6)")
