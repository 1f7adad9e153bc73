"""Contains the servers' access to Valkey: client, request queue, switches, users of workers.

Not here: key names and scripts (`worker_runtime/protocol`), and a worker's own client
(`worker_runtime/process/valkey.py`).
"""
