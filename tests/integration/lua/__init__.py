"""Tests the scripts of requests, workers and limits on a real Valkey."""
