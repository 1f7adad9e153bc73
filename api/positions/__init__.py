"""Shows positions and balances; closes and reverses positions without sending a close twice.

There is no `service.py`, because it has two services: `closer.py` shows and closes positions, and
`intents.py` reverses them.

Not here: sending single orders (`api/orders`), and the list that a broker gives
(`worker_runtime/trading/reconciliation.py`).
"""
