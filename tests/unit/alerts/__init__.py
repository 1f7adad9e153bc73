"""Tests what operators are alerted of, and when."""
