"""Tests each port with one suite for all its adapters and its fake."""
