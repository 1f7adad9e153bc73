"""Implements `berth bench jobs` and `berth bench tiers`: our runner, its peers, and floors.

Not here: the leases of runners under load (`infra/lab/bench/starvation`).
"""
