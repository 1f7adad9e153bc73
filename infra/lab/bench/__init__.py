"""Implements `berth bench`: how fast and how dense,
next to a floor or a peer measured in the same run.

Not here: faults (`infra/lab/chaos`), and the figures that were measured (`docs/measured.md`).
"""
