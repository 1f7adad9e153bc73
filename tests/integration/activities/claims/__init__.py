"""Tests claims, stops, reloads and the waiting line."""
