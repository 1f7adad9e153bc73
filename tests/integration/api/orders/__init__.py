"""Tests orders, changes, closes and signals over REST."""
