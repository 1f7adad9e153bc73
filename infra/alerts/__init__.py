"""Collects errors and what each host measures of itself, and decides what operators are alerted of
and when.

Not here: the conditions, and making a job for each mail and webhook (`api/fleet/alerts.py`),
sending the mail (`worker_runtime/jobs/types/mail.py`), and Prometheus rules (`infra/monitoring`).
"""
