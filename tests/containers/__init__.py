"""Runs workers in real containers: a Docker daemon of our own, and the worker's image built for
it."""
