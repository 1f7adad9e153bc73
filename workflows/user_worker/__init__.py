"""Owns the life of one user's worker: claim, login, service, drain, end.

Not here: the claim itself (`activities/claims`), and orders, which never pass through Temporal.
"""
