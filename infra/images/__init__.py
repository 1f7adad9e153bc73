"""Describes the container images and what they install.

Not here: how containers are run (`infra/compose`, `infra/launchers`).
"""
