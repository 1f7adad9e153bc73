"""Tests the pure parts of launchers: documents, failures, caches, rates."""
