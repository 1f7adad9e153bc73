"""What a running job knows of itself, and what it can tell."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class JobContext(msgspec.Struct, frozen=True):
    """`fence` grows with every run of any job: whoever writes somewhere outside may pass it on."""

    job_id: str
    attempt: int
    fence: int
    _tell: Callable[[object], None]

    def progress(self, value: object) -> None:
        """Shows how far the job is: anything small that fits into JSON. May be called often."""
        self._tell(value)
