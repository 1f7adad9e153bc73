"""What asyncio's tasks wait for, shown when a test meets its time limit."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any


def all_stacks() -> str:
    """Each task that is not done, of any loop, and the lines in which it stands, the innermost
    last."""
    # asyncio's own list of them belongs to the running loop, and there is none any more.
    tasks = [
        task for task in gc.get_objects() if isinstance(task, asyncio.Task) and not task.done()
    ]
    return "\n".join("\n".join([task.get_name(), *_lines(task.get_coro())]) for task in tasks)


def _lines(waiting: Any) -> Iterator[str]:
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "ag_frame", None)
        if frame is not None:
            yield f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)
