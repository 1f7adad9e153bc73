"""Tests the pure states of workflows, without Temporal."""
