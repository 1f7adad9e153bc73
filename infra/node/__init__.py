"""Implements `berth node`: owns the worker processes of one host,
so that no orchestrator is their parent.

Not here: the launcher that calls it (`infra/launchers/process.py`), and what runs inside a worker
(`worker_runtime`).
"""
