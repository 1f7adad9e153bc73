"""Contains the servers' side of the job queue:
its client, the jobs kept in PostgreSQL, the fleet's runners.

Not here: the runner that executes jobs, and the queue's scripts (`worker_runtime/jobs`).
"""
