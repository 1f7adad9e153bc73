"""Tests the connection to Temporal: TLS, keys, and what its histories show."""
