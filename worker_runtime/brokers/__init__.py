"""Brokers: one small interface and its adapters."""
