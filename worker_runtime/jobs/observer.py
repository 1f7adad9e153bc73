"""Notices runners that have died, by their beats and by this process's own clock.

Nobody compares clocks: a step of Valkey's clock, or of a host's, makes no runner look dead. And only time
in which this runner could look counts: after an outage of Valkey every runner has a whole lease to come
back, so no healthy one loses its jobs (invariant *no-healthy-kill*).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Seen:
    beat: bytes
    still: float = 0.0


class Observer:
    """`lease` in seconds; looks should come every `lease / 20`."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._most = 3 * self.period
        self._last: float | None = None
        self._seen: dict[str, _Seen] = {}

    @property
    def period(self) -> float:
        """Seconds between two looks while other runners are there."""
        return min(1.0, self._lease / 20)

    def look(self, beats: dict[str, bytes], own: str, now: float) -> list[tuple[str, bytes]]:
        """Takes the beats of all in; returns those that stood still for a lease. `now` is monotonic."""
        # A look that comes late proves less than it seems: the others may have been held up like this one.
        passed = 0.0 if self._last is None else min(now - self._last, self._most)
        self._last = now
        seen, dead = {}, []
        for runner, beat in beats.items():
            if runner == own:
                continue
            before = self._seen.get(runner)
            if before is None or before.beat != beat:
                before = _Seen(beat)
            else:
                before.still += passed
            seen[runner] = before
            if before.still >= self._lease:
                dead.append((runner, beat))
        self._seen = seen
        return dead

    def forget(self) -> None:
        """After a lost connection: count anew."""
        self._last = None

    def others(self) -> bool:
        return bool(self._seen)
