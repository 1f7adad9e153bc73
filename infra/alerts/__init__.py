"""Collects errors, and decides what operators are alerted of and when.

Not here: sending alerts (`api/fleet/alerts.py`), and Prometheus rules (`infra/monitoring`).
"""
