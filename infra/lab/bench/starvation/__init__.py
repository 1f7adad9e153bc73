"""Implements `berth bench heartbeat` and `berth bench lease`:
whether a renewal is ever late under load.

Not here: throughput (`infra/lab/bench/order.py`, `infra/lab/bench/jobs`).
"""
