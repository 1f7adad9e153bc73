"""A scripted runner on a host whose clock is wrong: `python -m tests.support.jobs.stepped_program`.

The file `BERTH_CLOCK` says by how many seconds, whenever it is asked. Its children inherit it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.support.jobs.scripted_program import SCRIPTED
from worker_runtime.jobs.__main__ import main
from worker_runtime.jobs.types.job_registry import PING_JOB, JobRegistry

_wall, _wall_ns = time.time, time.time_ns


def _off() -> int:
    """Seconds."""
    return int(Path(os.environ["BERTH_CLOCK"]).read_text() or 0)


if __name__ == "__main__":
    time.time = lambda: _wall() + _off()
    time.time_ns = lambda: _wall_ns() + _off() * 1_000_000_000
    sys.exit(main(JobRegistry(SCRIPTED, PING_JOB)))
