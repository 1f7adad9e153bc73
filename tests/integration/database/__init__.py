"""Tests tables, queries and migrations on a real PostgreSQL."""
