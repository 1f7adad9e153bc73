"""Gives a user a worker, ends it, gives it new credentials, and lists the users of the morning.

Not here: launching workers (`activities/pool`), and the worker's side of a claim
(`worker_runtime/session/claim.py`).
"""
