"""Launches workers, counts and shrinks pools, and reads and writes pool entries in Valkey.

Not here: how many workers a pool should have (`workflows/worker_pool/state.py`), and the platforms
(`infra/launchers`).
"""
