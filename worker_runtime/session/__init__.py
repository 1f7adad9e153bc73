"""Runs the session process: claim, request queue, control messages, answers and events.

Not here: what is done with an order (`worker_runtime/trading`), and renewing the mark
(`worker_runtime/process`).
"""
