"""Takes signals from charting programs, verifies them, and places their orders one after the other.

Not here: placing a single order (`api/orders`), the stored signals
(`infra/database/trading/signals.py`), and outgoing webhooks, which are jobs.
"""
