"""Reads the exits that a launcher reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from infra.worker_task import TaskExit


async def read_exits(exits: AsyncIterator[TaskExit], count: int) -> list[TaskExit]:
    """Returns the next exits, each within 20 s."""
    return [await asyncio.wait_for(anext(exits), 20) for _ in range(count)]
