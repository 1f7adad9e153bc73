"""Tests the paper exchange's market: matching, hours, limits, positions."""
