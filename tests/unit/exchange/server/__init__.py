"""Tests the paper exchange's protocols and its process."""
