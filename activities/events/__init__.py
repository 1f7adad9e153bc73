"""Reads what workers and launchers report, records it, and signals the workflows concerned.

Not here: what a workflow does with a signal (`workflows/user_worker`), and the worker's side
(`worker_runtime/session/send_buffer.py`).
"""
