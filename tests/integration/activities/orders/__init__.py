"""Tests the sweeper, verification and reconciliation."""
