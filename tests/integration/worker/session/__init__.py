"""Tests claims, control messages, leases and replacements of a worker's session."""
