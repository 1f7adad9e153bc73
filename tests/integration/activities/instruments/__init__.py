"""Tests the loads of brokers' instruments."""
