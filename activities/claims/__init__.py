"""Gives a user a worker, ends that worker, and gives it new credentials.

Not here: launching workers (`activities/pool`), and the worker's side of a claim
(`worker_runtime/session/claim.py`).
"""
