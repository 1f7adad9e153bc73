"""Orders tell their changes: which transaction changed one last, and a notice of it"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_THIS_TRANSACTION = "cast(cast(pg_current_xact_id() as text) as bigint)"
#: What the API shows of an order and may change.
_SHOWN = (
    *("state", "reason_code", "reason", "broker_order_id", "filled_quantity", "average_price"),
    *("attention", "quantity", "price"),
)


def upgrade() -> None:
    # Not streamed: what was there before.
    op.add_column(
        "orders", sa.Column("changed", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    )
    op.alter_column("orders", "changed", server_default=sa.text(_THIS_TRANSACTION))
    op.create_index("orders_by_change", "orders", ["user_id", "changed"])
    op.execute(f"""
    create function order_changed() returns trigger language plpgsql as $$
    begin
      new.changed := {_THIS_TRANSACTION};
      perform pg_notify('berth_orders', new.user_id);
      return new;
    end $$
    """)
    old, new = (", ".join(f"{side}.{name}" for name in _SHOWN) for side in ("old", "new"))
    op.execute(f"""
    create trigger orders_changed before update on orders for each row
      when (row({old}) is distinct from row({new})) execute function order_changed()
    """)


def downgrade() -> None:
    op.execute("drop trigger orders_changed on orders")
    op.execute("drop function order_changed()")
    op.drop_index("orders_by_change", table_name="orders")
    op.drop_column("orders", "changed")
