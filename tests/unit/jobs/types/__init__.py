"""Tests each job type with receivers on this machine."""
