"""Tests that long-lived workflows and Schedules come back after somebody ended them."""
