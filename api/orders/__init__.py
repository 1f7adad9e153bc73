"""Checks, places, changes, lists and exports orders.

Not here: submitting to a broker (`worker_runtime/trading`), closes and reversals (`api/positions`),
and the statement that accepts an order (`infra/database/orders/acceptance.py`).
"""
