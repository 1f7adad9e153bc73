"""Traces an order, a claim and a job through a real system, and compares the files with the
documents."""
