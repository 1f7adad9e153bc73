"""Tests pool counting, launching, shrinking and rollouts."""
