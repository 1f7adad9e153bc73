"""Checks, places, changes, lists and exports orders.

There is no `service.py`, because it has several services: `placer.py` places orders, `changes.py`
cancels and changes them, `outcomes.py` reads them and writes their outcomes, `export.py` exports
them. `checks.py` has the pre-trade checks.

Not here: submitting to a broker (`worker_runtime/trading`), closes and reversals (`api/positions`),
and the statement that accepts an order (`infra/database/orders/acceptance.py`).
"""
