"""CPU time by part of the system, so that a figure also says where the time goes."""

from __future__ import annotations

import psutil

from infra.bench.target import Target


def _spent(pids: list[int]) -> float:
    """CPU seconds of these processes and their descendants so far."""
    total = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    return total


class CpuMeter:
    """What each part has used since it was made."""

    def __init__(self, target: Target) -> None:
        self._parts = {server.name: [server.pid] for server in target.stack.servers if server.name != "node"}
        self._parts["workers"] = [pid for pid in target.worker_pids().values()]
        self._before = {name: _spent(pids) for name, pids in self._parts.items()}

    def milliseconds(self, count: int) -> dict[str, float]:
        """CPU milliseconds by part, divided by `count` pieces of work."""
        return {
            name: round((_spent(pids) - self._before[name]) * 1000 / count, 2)
            for name, pids in self._parts.items()
        }
