"""Connects users who traded recently before their market opens.

Not here: which users those are (`activities/claims/morning.py`), and pool sizes
(`workflows/worker_pool`).
"""
