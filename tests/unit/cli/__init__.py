"""Tests the command line's output and its way to the API."""
