"""Tests workflows on Temporal's test server, with scripted activities."""
