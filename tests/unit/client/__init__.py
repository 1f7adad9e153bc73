"""Tests the Python client before a scripted API."""
