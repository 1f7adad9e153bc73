"""Tests the pure parts of activities: anomalies, guards, build ids."""
