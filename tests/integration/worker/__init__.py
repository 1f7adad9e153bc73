"""Tests user workers as real processes on a real Valkey."""
