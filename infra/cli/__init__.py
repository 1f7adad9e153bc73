"""The command `berth`. Each command imports what it needs when it runs: `berth --help` takes 0.1 s."""

from infra.cli.app import main

__all__ = ["main"]
