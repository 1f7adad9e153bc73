"""Submits, changes and tracks orders, sends their events and answers, and keeps the broker
sessions.

`worker_runtime/trading/order_tracker.py` merges fills (`average_fill_price`).

Not here: the queue that orders come from (`worker_runtime/session`), and a broker's protocol
(`worker_runtime/brokers`).
"""
