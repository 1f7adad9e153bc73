"""Enqueues, shows and cancels background jobs, and sets the limits of job types.

Not here: running jobs (`worker_runtime/jobs`), and the queue's client (`infra/jobs`).
"""
