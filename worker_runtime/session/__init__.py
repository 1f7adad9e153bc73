"""Runs the session process: claim, request queue, control messages.

Not here: what is done with an order, its answer and its events (`worker_runtime/trading`), and
renewing the mark (`worker_runtime/process`).
"""
