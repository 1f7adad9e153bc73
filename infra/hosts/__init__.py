"""Plans how many worker hosts are needed, and sets that number on the platform.

Not here: starting workers on hosts (`infra/launchers`), and how many workers a pool has
(`workflows/worker_pool`).
"""
