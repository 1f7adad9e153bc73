"""Runs workers as containers of one Docker host.

Not here: building the image (`infra/images`).
"""
