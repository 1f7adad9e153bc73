"""Measures large fleets, simulated or written straight into the servers, next to a naive design.

Not here: single workers (`infra/lab/bench/memory.py`, `infra/lab/bench/density.py`).
"""
