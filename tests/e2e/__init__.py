"""Tests the whole system as real processes, started once for all modules."""
