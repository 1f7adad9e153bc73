"""Tests the workflow of one user's worker."""
