"""Tests that this release and the ones before read each other's messages."""
