"""Tests the submitter, tracker, changer and rate limiter."""
