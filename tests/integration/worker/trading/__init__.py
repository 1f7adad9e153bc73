"""Tests what a worker does with orders: limits, switches, lists, unknown outcomes."""
