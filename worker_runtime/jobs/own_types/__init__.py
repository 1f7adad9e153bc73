"""Runs an application's own job types: a fork server without keys,
its children, the runner's side of both.

`worker_runtime/jobs/own_types/child.py` decides whether an exception is retried.

Not here: the declarations (`infra/berth_jobs`, which these modules import as `berth_jobs`) and the
built-in types (`worker_runtime/jobs/types`).
"""
