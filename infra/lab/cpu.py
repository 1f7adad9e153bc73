"""CPU time by part of the system, so that a figure also says where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from infra.lab.target import Target


def cpu_seconds(*pids: int) -> float:
    """Returns the CPU seconds of these processes and their descendants so far."""
    total = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    return total


class CpuMeter:
    """CPU time that each part has used since this object was made."""

    def __init__(self, target: Target) -> None:
        self._parts = {
            server.name: [server.pid] for server in target.stack.servers if server.name != "node"
        }
        self._parts["workers"] = [pid for pid in target.worker_pids().values()]
        self._before = {name: cpu_seconds(*pids) for name, pids in self._parts.items()}

    def milliseconds(self, count: int) -> dict[str, float]:
        """Returns CPU milliseconds by part, divided by `count` pieces of work."""
        return {
            name: round((cpu_seconds(*pids) - self._before[name]) * 1000 / count, 2)
            for name, pids in self._parts.items()
        }


class StolenTime:
    """Measures the time that a virtual machine's host gives to others, from now on: without it two
    runs cannot be compared."""

    def __init__(self, read_times: Callable[[], Any] = psutil.cpu_times) -> None:
        self._read_times = read_times
        self._before = _used_and_stolen(read_times())

    def percent(self) -> float:
        """Returns the stolen percent of the CPU time that this machine wanted since this object was
        made; 0 where the kernel does not tell."""
        got, stolen = (
            now - then
            for now, then in zip(_used_and_stolen(self._read_times()), self._before, strict=True)
        )
        return round(stolen / (got + stolen) * 100, 1) if stolen > 0 else 0.0


def _used_and_stolen(times: Any) -> tuple[float, float]:
    """Returns the CPU seconds that the machine had so far, and those that it wanted and did not
    get."""
    idle = times.idle + getattr(times, "iowait", 0.0)
    stolen = getattr(times, "steal", 0.0)
    # Guests are counted in `user` and `nice` already.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return sum(times) - idle - stolen - guests, stolen


class CpuShare:
    """The share of one core that each process takes with its descendants, from now on."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._began = time.monotonic()
        self._before = {name: cpu_seconds(pid) for name, pid in self._pids.items()}

    def percent(self) -> dict[str, float]:
        """Returns the percent of one core since this object was made."""
        seconds = time.monotonic() - self._began
        return {
            name: round((cpu_seconds(pid) - self._before[name]) / seconds * 100, 2)
            for name, pid in self._pids.items()
        }
