"""Makes the daily report, and enqueues a job for each user's daily statement.

Not here: writing and sending a statement (`worker_runtime/jobs/types/statements.py`), and the query
of the figures (`infra/database/reports.py`).
"""
