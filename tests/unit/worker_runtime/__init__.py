"""Tests the parts of a worker without Valkey."""
