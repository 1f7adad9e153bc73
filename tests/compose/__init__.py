"""Runs `compose.yaml` under a real Docker engine."""
