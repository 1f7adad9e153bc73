"""Implements `berth chaos`: injects faults into
a system of its own, and judges its orders and jobs.

Not here: the chaos tests of the suite (`tests/chaos`).
"""
