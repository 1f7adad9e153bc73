"""Tests the job queue and its runner on a real Valkey."""
