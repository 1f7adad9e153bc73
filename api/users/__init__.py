"""Manages users, their broker accounts, credentials, limits and statement addresses.

`api/users/service.py` (`create_user`) makes a user's first API key.

Not here: encrypting credentials (`infra/vault`), and using them (`worker_runtime/session`).
"""
