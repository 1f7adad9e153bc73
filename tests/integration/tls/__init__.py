"""Servers behind TLS: what our clients check, and that all of them get through."""
