"""Contains what `compose.yaml` mounts and runs: configuration files, secret files, health checks.

Not here: the images (`infra/images`), and the servers of `make run` (`infra/local`).
"""
