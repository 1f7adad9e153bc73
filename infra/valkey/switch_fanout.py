"""Copies the trading switches from PostgreSQL, which owns them, to each user's `trading:switch` key.

A change is copied at once. If that fails or Valkey loses it, the mark watcher finds a switch that is missing
or older than PostgreSQL's and copies it again. A worker takes a missing switch as halted.

Each copy holds the id of the server it was written to. A promoted replica that lagged behind may hold an
older switch: its id is another server's, so workers take no orders under it. The server's id is read before
the switches, so that none of them is older than what an earlier server had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from infra.database.trading.switches import SwitchSnapshot
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.requests import SWITCH_SERVER, SWITCH_VERSION, UserSwitch

#: Users in one pipeline; other commands run between two pipelines.
CHUNK = 500


async def write_switches(client: Redis, server: str, switches: Mapping[str, UserSwitch]) -> None:
    """Writes each user's switch unless Valkey has a newer one; safe to repeat. Raises `RedisError`.

    `server` is the server's id, read before the switches.
    """
    addressed = [(user_id, addressed_to(switch, server)) for user_id, switch in switches.items()]
    for start in range(0, len(addressed), CHUNK):
        async with client.pipeline(transaction=False) as pipe:
            pipe.script_load(scripts.WRITE_SWITCH.source)
            for user_id, switch in addressed[start : start + CHUNK]:
                pipe.evalsha(scripts.WRITE_SWITCH.sha, 1, keys.switch(user_id), *map(str, switch.words()))
            _, *replies = await pipe.execute()
        if not {bytes(reply) for reply in replies} <= {b"ok", b"older"}:
            raise ResponseError(f"unexpected replies to a switch: {set(replies)}")


def addressed_to(switch: UserSwitch, server: str) -> UserSwitch:
    return msgspec.structs.replace(switch, server=server)


async def users_behind(
    client: Redis, server: str, snapshot: SwitchSnapshot, users: Sequence[str]
) -> list[str]:
    """Returns users whose switch in Valkey is missing, older than the snapshot, or another server's.

    Raises `RedisError`.
    """
    found = []
    for start in range(0, len(users), CHUNK):
        chunk = users[start : start + CHUNK]
        async with client.pipeline(transaction=False) as pipe:
            for user_id in chunk:
                pipe.hmget(keys.switch(user_id), SWITCH_VERSION, SWITCH_SERVER)
            there = await pipe.execute()
        for user_id, (version, holder) in zip(chunk, there, strict=True):
            wanted = snapshot.for_user(user_id).version
            if version is None or int(version) < wanted or holder != server.encode():
                found.append(user_id)
    return found
