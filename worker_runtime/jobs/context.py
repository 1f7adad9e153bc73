"""What a running job knows of itself, and what it can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class JobContext:
    """`fence` grows with every run of any job: whoever writes somewhere outside may pass it on."""

    job_id: str
    attempt: int
    fence: int
    _tell: Callable[[object], None] = field(repr=False)

    def progress(self, value: object) -> None:
        """Shows how far the job is: anything small that fits into JSON. May be called often."""
        self._tell(value)
