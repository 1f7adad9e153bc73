"""Tests that documents, settings, references and compose files say what the code says."""
