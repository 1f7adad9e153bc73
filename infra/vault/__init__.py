"""Encrypts credentials at rest, seals them to a worker, and manages every key and its versions.

Not here: opening what was sealed, which only a worker can do
(`worker_runtime/protocol/sealing.py`).
"""
