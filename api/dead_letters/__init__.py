"""Lists what has failed for good, and retries or dismisses it.

Not here: the table and its rules (`infra/database/dead_letters.py`), and orders of unknown outcome
(`api/attention`).
"""
