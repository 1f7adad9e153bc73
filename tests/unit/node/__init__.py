"""Tests the node's register, processes, limits and logs."""
