"""Tests our clients with servers behind TLS."""
