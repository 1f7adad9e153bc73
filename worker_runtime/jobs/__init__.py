"""Runs background jobs: the queue as a runner sees it, the runner, its child processes.

A job's progress goes from `worker_runtime/jobs/child_process.py` to
`worker_runtime/jobs/executor.py`, which writes it.

Not here: the producers' side and the jobs kept in PostgreSQL (`infra/jobs`).
"""
