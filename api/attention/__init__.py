"""Lists the orders and differences that need an operator's decision, and takes that decision.

Not here: finding them (`activities/orders`), and failed jobs or workflows (`api/dead_letters`).
"""
