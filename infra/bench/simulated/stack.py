"""A local stack whose workers are simulated; everything else is real."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.bench.simulated.habits import Habits
from infra.local.components import Node
from infra.local.stack import LocalStack
from infra.settings import Settings

#: Launches per second: what limits a host's real processes must not limit simulated ones.
_LAUNCH_RATE = 1000.0


class SimulatedNode(Node):
    """`python -m infra.bench.simulated` in the node's place; its workers end with it."""

    module = "infra.bench.simulated"
    keeps_children = False

    def __init__(self, directory: Path, settings: Settings, habits: Habits) -> None:
        super().__init__(directory, settings)
        self._habits = habits

    def command(self) -> Sequence[str]:
        habits = self._habits
        words = ["--start", str(habits.start), "--connect", str(habits.connect)]
        return [*super().command(), *words, *(["--used"] if habits.used else [])]


class SimulatedStack(LocalStack):
    """`LocalStack` with simulated workers."""

    def __init__(self, directory: Path, *, habits: Habits, **options: Any) -> None:
        super().__init__(directory, launch_rate=_LAUNCH_RATE, **options)
        real = self.node
        node = SimulatedNode(real.directory, self.settings, habits)
        node.log_path, node.records = real.log_path, real.records
        self.node = node
        self.servers = tuple(node if server is real else server for server in self.servers)
