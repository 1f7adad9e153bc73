"""Fleets that are simulated or planted, and the naive design that `berth bench idle` compares with ours."""
