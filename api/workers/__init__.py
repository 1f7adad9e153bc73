"""Starts, stops and shows a user's worker; sends requests to it and receives its answers.

Not here: the life of a worker (`workflows/user_worker`), and starting its workflow
(`infra/temporal/starter.py`).
"""
