"""Settles orders whose outcome nobody knows, and compares our books with the broker's.

Not here: placing orders (`api/orders`, `worker_runtime/trading`), and recording order events
(`activities/events/recorder.py`).
"""
