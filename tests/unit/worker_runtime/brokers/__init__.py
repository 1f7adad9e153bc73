"""Tests the paper adapter's connection with a scripted exchange."""
