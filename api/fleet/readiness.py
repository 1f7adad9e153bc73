"""Checks all servers that the API needs, at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import text

from api.fleet.schemas import DependencyView
from api.fleet.schemas import ReadinessView as View
from api.workers.service import WorkerControl
from infra.database.engine import Database
from worker_runtime.protocol.errors import BerthError

#: Seconds that one answer may take.
TIMEOUT = 1.0


@dataclass(frozen=True, eq=False)
class ReadinessProbe:
    database: Database
    client: Redis
    control: WorkerControl
    migrated: Callable[[], bool]

    async def check(self) -> View:
        found = await asyncio.gather(
            _probe(self._postgresql()), _probe(self.client.ping()), _probe(self.control.check(TIMEOUT))
        )
        names = ("postgresql", "valkey", "temporal")
        dependencies = dict(zip(names, found, strict=True))
        return View(ready=all(one.state == "up" for one in found), dependencies=dependencies)

    async def _postgresql(self) -> None:
        if not self.migrated():
            raise BerthError("the schema is not up to date yet")
        async with self.database.session() as session:
            await session.execute(text("select 1"))


async def _probe(call: Awaitable[Any]) -> DependencyView:
    began = time.perf_counter()
    reason = ""
    try:
        async with asyncio.timeout(TIMEOUT):
            await call
    except TimeoutError:
        reason = f"no answer within {TIMEOUT:.0f} s"
    except RedisError as error:
        reason = type(error).__name__  # its text has addresses in it
    except BerthError as error:
        reason = error.detail
    ms = round((time.perf_counter() - began) * 1000, 2)
    return DependencyView(state="down" if reason else "up", ms=ms, reason=reason)
