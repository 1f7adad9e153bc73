"""Tests the calendar, symbols and windows."""
