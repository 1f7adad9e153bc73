"""Tests the API on real servers, with a scripted worker."""
