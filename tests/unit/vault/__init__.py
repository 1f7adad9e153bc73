"""Tests encryption at rest, keys and their versions."""
