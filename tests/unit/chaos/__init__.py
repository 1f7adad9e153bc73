"""Tests the judges and schedules of the chaos runs."""
