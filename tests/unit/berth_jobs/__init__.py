"""Tests the job runner without Valkey."""
