"""Manages users, their broker accounts, credentials, limits and statement addresses.

Not here: encrypting credentials (`infra/vault`), and using them (`worker_runtime/session`).
"""
