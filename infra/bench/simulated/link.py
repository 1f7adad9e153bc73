"""The Valkey connections of a simulated node: few for commands, one for each worker that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from redis.exceptions import NoScriptError

from infra import valkey
from infra.bench.simulated.calls import Call
from worker_runtime.protocol import scripts

#: Seconds of one blocking wait. Long, so that thousands of idle workers ask for little.
_BLOCK = 240.0
#: Workers that wait at once: Valkey's own limit is 10,000 connections.
_WAITING_MAX = 9000
#: Connections for everything else; who comes when all are taken waits for one.
_COMMANDS = 32


class Link:
    """Shared by all workers of the node. Calls raise `RedisError` or `OSError`."""

    def __init__(self, url: str) -> None:
        self._client: Any = valkey.connect(url, max_connections=2 * _COMMANDS)
        self._turn = asyncio.Semaphore(_COMMANDS)
        self._waiting: Any = valkey.connect(url, socket_timeout=_BLOCK + 30.0, max_connections=_WAITING_MAX)

    async def close(self) -> None:
        await self._waiting.aclose()
        await self._client.aclose()

    async def run(self, call: Call) -> Any:
        async with self._turn:
            return await valkey.run(self._client, call.script, call.keys, call.args)

    async def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """All of them in one round trip; each result is a reply or an error."""
        results = await self._send(calls)
        if any(isinstance(result, NoScriptError) for result in results):  # a new or flushed server
            for script in scripts.ALL:
                await self._client.script_load(script.source)
            # All again: a renewal may be repeated.
            results = await self._send(calls)
        return results

    async def _send(self, calls: Sequence[Call]) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        for call in calls:
            pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
        async with self._turn:
            return cast("list[Any]", await pipe.execute(raise_on_error=False))

    async def execute(self, *commands: tuple[Any, ...]) -> None:
        """Plain commands in one round trip."""
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        async with self._turn:
            await pipe.execute()

    async def take(self, *lists: str) -> tuple[str, bytes] | None:
        """Pops from the first of these lists that has something: (list, item), or None after a long wait."""
        found = await self._waiting.blpop(list(lists), _BLOCK)
        return None if found is None else (found[0].decode(), found[1])
