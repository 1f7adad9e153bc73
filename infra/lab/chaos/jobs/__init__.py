"""Implements `berth chaos jobs`: runners that are killed or frozen at each step, and the judge.

Not here: orders (`infra/lab/chaos/orders`).
"""
