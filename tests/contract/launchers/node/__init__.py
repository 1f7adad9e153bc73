"""Tests the node and the process launcher with real processes."""
