"""Defines what crosses Valkey for jobs: keys, messages, scripts, job types. Servers import it, too.

Not here: the code of a job (`worker_runtime/jobs/types`).
"""
