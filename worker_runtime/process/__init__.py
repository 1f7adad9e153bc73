"""Runs the processes of a worker: zygote, supervisor, shared state, lease, mark, Valkey client.

Not here: brokers and orders (`worker_runtime/session`, `worker_runtime/trading`).
"""
