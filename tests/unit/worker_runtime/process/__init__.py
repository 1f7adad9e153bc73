"""Tests zygote, shared state, pulse, configuration and imports."""
