"""Contains the queries of workers: assignments and epochs, launches, pools, timelines.

Not here: marks, owner keys and pool entries, which are in Valkey (`activities/pool/entries.py`).
"""
