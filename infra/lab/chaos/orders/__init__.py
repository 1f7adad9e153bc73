"""Implements `berth chaos orders`: users trade while
faults are injected, and a judge compares both books.

Not here: jobs (`infra/lab/chaos/jobs`).
"""
