"""Implements `berth bench claim-race`:
claimers that are killed, and the fake workers that they claim.

Not here: the speed of a claim (`infra/lab/bench/claim.py`).
"""
