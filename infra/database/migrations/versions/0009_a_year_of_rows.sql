worker_sessions_by_end on worker_sessions (ended_at)

worker_launches_by_time on worker_launches (launched_at)

worker_transitions_by_time on worker_transitions using brin (recorded_at) with (autosummarize = on)

order_tags_by_day on order_tags using brin (trading_day) with (autosummarize = on)

audit_trail_by_time on audit_trail using brin (at) with (autosummarize = on)

audit_trail_but_orders on audit_trail (id) where action <> 'order.accepted'

api_keys_by_session on api_keys (session_of) where session_of is not null

orders_by_broker_id on orders (user_id, account_id, broker_order_id) where broker_order_id is not null

orders_filled on orders (user_id, account_id) include (symbol, side, lot, filled_quantity) where filled_quantity > 0
