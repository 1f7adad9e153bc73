"""Defines the broker port and its adapters.

Not here: when a broker may be called, which limits apply, and what a failure means
(`worker_runtime/trading`).
"""
