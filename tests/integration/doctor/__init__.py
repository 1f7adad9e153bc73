"""Tests `berth doctor` at real servers and with wrong settings."""
