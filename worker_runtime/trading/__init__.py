"""Submits, changes and tracks orders, and opens, checks and rebuilds broker sessions.

Not here: the queue that orders come from (`worker_runtime/session`), and a broker's protocol
(`worker_runtime/brokers`).
"""
