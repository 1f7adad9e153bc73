"""Tests the workflows of pools, rollouts, maintenance, orders and reports."""
