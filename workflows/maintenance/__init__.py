"""Runs one pass of maintenance: a scan, then a child workflow for each hundred anomalies.

Not here: what counts as an anomaly and how it is cleaned up (`activities/maintenance`).
"""
