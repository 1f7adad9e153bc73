"""Runs an application's own job types: a fork server without keys,
its children, the runner's side of both.

Not here: the declarations (`infra/berth_jobs`, which these modules import as `berth_jobs`) and the
built-in types (`worker_runtime/jobs/types`).
"""
