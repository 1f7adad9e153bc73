"""Sets and shows the kill switches of everybody, a user or an account.

Not here: enforcing them, at acceptance (`infra/database/orders/acceptance.py`) and before each
submission (`worker_runtime/trading/order_submitter.py`).
"""
