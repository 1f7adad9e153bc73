"""Scans the fleet for anomalies, cleans them up, and enqueues jobs that Valkey has lost.

Not here: the loop that watches marks every 2 s (`activities/events/mark_watcher.py`), and deleting
old rows (`infra/database/retention.py`).
"""
