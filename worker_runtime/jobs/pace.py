"""How long the jobs of each type take lately: jobs are claimed ahead of brief ones only."""

from __future__ import annotations

#: Seconds. With 0.4 ms of the runner's and Valkey's for each job there is little to gain on longer ones; and
#: eight of these are over before they would have gained much by another runner.
BRIEF = 0.002
#: Seconds that one run counts at the most: a moment in which the host did something else is not the type's.
_MOST = 0.01
#: Seconds that a type is taken to need before it has run: six quick runs, and it is brief.
_UNKNOWN = 0.004
_WEIGHT = 1 / 8


class Pace:
    """A moving average for each type, of what the children measured: without the way to them and back."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}
        #: The types that are brief, comma separated, as a claim takes them.
        self.brief = ""
        self._brief: set[str] = set()

    def ran(self, name: str, seconds: float) -> None:
        """One run, which took so long."""
        mean = self._mean.get(name, _UNKNOWN)
        mean += (min(seconds, _MOST) - mean) * _WEIGHT
        self._mean[name] = mean
        if (mean < BRIEF) != (name in self._brief):
            self._brief ^= {name}
            self.brief = ",".join(sorted(self._brief))

    def is_brief(self, name: str) -> bool:
        return name in self._brief
