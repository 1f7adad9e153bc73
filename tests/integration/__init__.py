"""Tests our code on real servers: Valkey, PostgreSQL, Temporal."""
