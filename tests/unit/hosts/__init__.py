"""Tests the plan of hosts on simulated platforms."""
