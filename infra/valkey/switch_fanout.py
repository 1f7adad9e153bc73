"""From PostgreSQL, which owns the switches, to each user's slot in Valkey, where workers meet them.

Whoever switches tells it at once. Should he die in between, or Valkey lose it, the watcher's next look finds
a switch that is missing or older than PostgreSQL's, and tells it again. A missing one means halted.

Each switch bears the id of the server that it was told to. A copy of Valkey that lagged, and was promoted,
may hold an older switch: it bears another server's id, and workers take no order by it. So the id is read
before the switches are: no change that an earlier server had been told of can then be missing from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from infra.database.trading.switches import SwitchSnapshot
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.switches import SERVER, VERSION, UserSwitch

#: Users in one pipeline: other commands get their turn in between.
CHUNK = 500


async def write_switches(client: Redis, server: str, switches: Mapping[str, UserSwitch]) -> None:
    """Writes each user's switch; a newer one stays. Raises `RedisError`; repeating it does no harm.

    `server`: `valkey.server_id` from before the switches were read.
    """
    told = [(user_id, addressed_to(switch, server)) for user_id, switch in switches.items()]
    for start in range(0, len(told), CHUNK):
        async with client.pipeline(transaction=False) as pipe:
            pipe.script_load(scripts.WRITE_SWITCH.source)
            for user_id, switch in told[start : start + CHUNK]:
                pipe.evalsha(scripts.WRITE_SWITCH.sha, 1, keys.switch(user_id), *map(str, switch.words()))
            _, *replies = await pipe.execute()
        if not {bytes(reply) for reply in replies} <= {b"ok", b"older"}:
            raise ResponseError(f"a switch was answered with something else: {set(replies)}")


def addressed_to(switch: UserSwitch, server: str) -> UserSwitch:
    return msgspec.structs.replace(switch, server=server)


async def users_behind(
    client: Redis, server: str, picture: SwitchSnapshot, users: Sequence[str]
) -> list[str]:
    """Users whose switch is missing in Valkey, older than this picture, or another server's. Raises
    `RedisError`."""
    found = []
    for start in range(0, len(users), CHUNK):
        chunk = users[start : start + CHUNK]
        async with client.pipeline(transaction=False) as pipe:
            for user_id in chunk:
                pipe.hmget(keys.switch(user_id), VERSION, SERVER)
            there = await pipe.execute()
        for user_id, (version, told) in zip(chunk, there, strict=True):
            if version is None or int(version) < picture.of(user_id).version or told != server.encode():
                found.append(user_id)
    return found
