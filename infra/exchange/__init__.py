"""Implements the paper exchange: a small broker with a durable ledger, which judges our tests.

Not here: the worker's adapter for it (`worker_runtime/brokers/paper/broker.py`), and its messages
(`worker_runtime/brokers/paper/wire.py`).
"""
