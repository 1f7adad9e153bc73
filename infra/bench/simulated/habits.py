"""How simulated workers behave; durations are seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Habits:
    """The same for all workers of one simulated node."""

    #: From the launch to ready; a real worker process takes about as long on an idle core.
    start: float = 0.1
    #: A broker login; the paper exchange's takes about as long.
    connect: float = 0.01
    #: Whether their users are active all the time: then each renewal shows a new last activity.
    used: bool = False
