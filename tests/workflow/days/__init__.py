"""Runs a trading day and a year by a clock that jumps."""
