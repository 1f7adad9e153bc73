"""Contains the tables and queries around trading:
switches, limits, reconciliations, webhooks, signals.

Not here: orders (`infra/database/orders`).
"""
