"""Lists the orders and differences that need an operator's decision, and takes that decision.

There is no `service.py`: each route is one statement of `infra/database/orders/attention.py` or
`infra/database/trading/reconciliations.py`.

Not here: finding them (`activities/orders`), and failed jobs or workflows (`api/dead_letters`).
"""
