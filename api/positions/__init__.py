"""Shows positions and balances; closes and reverses positions without sending a close twice.

Not here: sending single orders (`api/orders`), and the list that a broker gives
(`worker_runtime/trading/reconciliation.py`).
"""
