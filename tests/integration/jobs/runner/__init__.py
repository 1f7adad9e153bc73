"""Tests real runner processes: kills, freezes, lost replies, each job type."""
