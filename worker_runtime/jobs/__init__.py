"""Runs background jobs: the queue as a runner sees it, the runner, its child processes.

Not here: the producers' side and the jobs kept in PostgreSQL (`infra/jobs`).
"""
