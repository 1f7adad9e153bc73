"""A cgroup with a CPU quota, v1 or v2: what a container's CPU limit is.

| | v1 | v2 |
|---|---|---|
| quota | cpu.cfs_quota_us, cpu.cfs_period_us | cpu.max |
| throttling | cpu.stat: nr_throttled, throttled_time (ns) | cpu.stat: the same, throttled_usec |
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from worker_runtime.process.cgroup import LimitsUnavailable, MemoryGroup, delegate, own_group

#: Microseconds; the kernel's usual period of a quota.
_QUOTA_PERIOD_US = 100_000
#: Longest time in seconds for the kernel to let go of killed processes.
_EMPTY_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Throttling:
    """What the quota has done so far."""

    #: Periods in which anything of the group ran.
    periods: int
    #: Periods before whose end the group had used up its quota.
    throttled: int
    #: Seconds that its threads were kept off the CPU by that.
    seconds: float

    def __sub__(self, earlier: Throttling) -> Throttling:
        return Throttling(
            self.periods - earlier.periods,
            self.throttled - earlier.throttled,
            round(self.seconds - earlier.seconds, 3),
        )


class CpuGroup:
    """One group with a quota; processes are added, counted and killed as in a memory group."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._group = MemoryGroup(path)

    def add(self, pid: int) -> None:
        """Moves a process; what it forks later is born inside."""
        self._group.add(pid)

    def throttling(self) -> Throttling:
        lines = (self._path / "cpu.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in (line.split() for line in lines)}
        nanoseconds = stat.get("throttled_time", stat.get("throttled_usec", 0) * 1000)
        return Throttling(stat["nr_periods"], stat["nr_throttled"], nanoseconds / 1e9)

    def end(self) -> None:
        """Kills all that is inside and removes the group.
        Raises `LimitsUnavailable` if it cannot be."""
        until = time.monotonic() + _EMPTY_TIMEOUT_S
        while True:
            self._group.kill()
            if self._group.remove():
                return
            if time.monotonic() > until:
                raise LimitsUnavailable(
                    f"{self._path} is not empty {_EMPTY_TIMEOUT_S:.0f} s after the kill"
                )
            time.sleep(0.05)


@contextlib.contextmanager
def cpu_group(name: str, percent: int) -> Iterator[CpuGroup]:
    """Yields a group of this name below our own, with a quota in percent of one core; ended with
    the block.

    Raises `LimitsUnavailable` where this host lets us make none.
    """
    version, own = own_group("cpu")
    quota = percent * _QUOTA_PERIOD_US // 100
    path = own / name
    try:
        if version == 2:
            delegate(own, "cpu")
        path.mkdir()
        if version == 1:
            (path / "cpu.cfs_period_us").write_text(str(_QUOTA_PERIOD_US))
            (path / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (path / "cpu.max").write_text(f"{quota} {_QUOTA_PERIOD_US}")
    except OSError as error:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise LimitsUnavailable(f"cgroup v{version} at {path}: {error.strerror}") from None
    group = CpuGroup(path)
    try:
        yield group
    finally:
        group.end()
