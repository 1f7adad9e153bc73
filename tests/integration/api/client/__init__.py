"""Tests the Python client before a real API."""
