"""Encrypts credentials at rest, seals them to a worker, and manages every key and its versions.

`infra/vault/certificate_reader.py` reads when an account's certificate expires.

Not here: opening what was sealed, which only a worker can do
(`worker_runtime/protocol/sealing.py`).
"""
