"""Indexes for what is asked of tables that hold a year and more: made while the service goes on."""

from alembic import op

from infra.database.migrate import without_transaction

revision = "0009"
down_revision = "0008"

_INDEXES = {
    "worker_sessions_by_end": "worker_sessions (ended_at)",
    "worker_launches_by_time": "worker_launches (launched_at)",
    "worker_transitions_by_time": "worker_transitions using brin (recorded_at) with (autosummarize = on)",
    "order_tags_by_day": "order_tags using brin (trading_day) with (autosummarize = on)",
    "audit_trail_by_time": "audit_trail using brin (at) with (autosummarize = on)",
    "audit_trail_but_orders": "audit_trail (id) where action <> 'order.accepted'",
    "api_keys_by_session": "api_keys (session_of) where session_of is not null",
    "orders_by_broker_id": "orders (user_id, account_id, broker_order_id) where broker_order_id is not null",
    "orders_filled": "orders (user_id, account_id) include (symbol, side, lot, filled_quantity)"
    " where filled_quantity > 0",
}


def upgrade() -> None:
    with without_transaction():
        for name, columns in _INDEXES.items():
            op.execute(f"drop index concurrently if exists {name}")
            op.execute(f"create index concurrently {name} on {columns}")
