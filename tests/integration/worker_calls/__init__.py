"""Tests calls to a worker, on a real Valkey."""
