"""Holds what a worker's processes share: supervisor,
shared state, lease, mark, doorbell, Valkey client.

Not here: the process that forks the others (`worker_runtime/zygote.py`), and brokers and orders
(`worker_runtime/session`, `worker_runtime/trading`).
"""
