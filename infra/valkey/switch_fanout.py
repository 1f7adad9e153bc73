"""Copies the trading switches from PostgreSQL, which owns them, to each user's `trading:switch`
key.

A change is copied at once. If that fails or Valkey loses it, the mark watcher finds a switch that
is missing or differs from PostgreSQL's and copies it again. A worker takes a missing switch as
halted, and one that is not signed by us, too.

Each copy holds the id of the server it was written to. A promoted replica that lagged behind may
hold an older switch: its id is another server's, so workers take no orders under it. The server's
id is read before the switches, so that none of them is older than what an earlier server had.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from infra.database.trading.switches import SwitchSnapshot
from infra.valkey.client import number_of, replies_of
from infra.vault.message_secret import Keys, MessageSecrets
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.requests import SWITCH_MAC, SWITCH_VERSION, UserSwitch

#: Users in one pipeline; other commands run between two pipelines.
USERS_PER_PIPELINE = 500
#: Users whose signed switch is kept for the next comparison.
_MAX_CACHED_SWITCHES = 20_000
#: Says that no switch with a newer version is overwritten.
_NOT_FORGED = "-"
_NEVER_OURS = 2**62


class SeenSwitch(NamedTuple):
    """A switch in Valkey that is not what it should be."""

    #: 0 if it is missing; `_NEVER_OURS` if we never write a version like it.
    version: int
    mac: bytes


class SwitchSigner:
    """Signs the switches of users for one server of Valkey."""

    def __init__(self, message_secrets: MessageSecrets) -> None:
        self._secrets = message_secrets
        self._signed: dict[str, tuple[UserSwitch, Keys, list[str]]] = {}

    def words(self, user_id: str, switch: UserSwitch, server: str) -> list[str]:
        """Returns the signed words of `UserSwitch.words`, addressed to the server with this run
        id."""
        request_keys = self._secrets.request_keys(user_id)
        addressed = msgspec.structs.replace(switch, server=server)
        known = self._signed.get(user_id)
        if known is not None and known[0] == addressed and known[1] is request_keys:
            return known[2]
        words = [str(word) for word in addressed.words(request_keys, user_id)]
        if len(self._signed) >= _MAX_CACHED_SWITCHES:
            self._signed.clear()
        self._signed[user_id] = addressed, request_keys, words
        return words


async def write_switches(
    client: Redis,
    signer: SwitchSigner,
    server: str,
    switches: Mapping[str, UserSwitch],
    seen: Mapping[str, SeenSwitch] | None = None,
) -> list[str]:
    """Writes each user's switch unless Valkey has a newer one, and returns the users that have one;
    safe to repeat. Raises `RedisError`, after all others are written if it is about some users
    only.

    `server` is the server's id, read before the switches. `seen`: what `users_behind` found before
    these switches were read from PostgreSQL. If it is newer than they are, it is forged and is
    overwritten.
    """
    refused: list[Any] = []
    newer: list[str] = []
    listed = list(switches.items())
    for start in range(0, len(listed), USERS_PER_PIPELINE):
        async with client.pipeline(transaction=False) as pipe:
            pipe.script_load(scripts.WRITE_SWITCH.source)
            for user_id, switch in listed[start : start + USERS_PER_PIPELINE]:
                seen_switch = (seen or {}).get(user_id)
                forged = seen_switch is not None and seen_switch.version > switch.version
                version, *words = signer.words(user_id, switch, server)
                may_go = seen_switch.mac if seen_switch is not None and forged else _NOT_FORGED
                pipe.evalsha(
                    scripts.WRITE_SWITCH.sha, 1, keys.switch(user_id), version, may_go, *words
                )
            _, *replies = await pipe.execute(raise_on_error=False)
        chunk = zip(listed[start : start + USERS_PER_PIPELINE], replies, strict=True)
        newer += [user_id for (user_id, _), reply in chunk if reply == b"older"]
        refused += [reply for reply in replies if reply not in (b"ok", b"older")]
    if refused:
        raise ResponseError(f"{len(refused)} switches were not written: {refused[0]!r:.200}")
    return newer


async def users_behind(
    client: Redis, signer: SwitchSigner, server: str, snapshot: SwitchSnapshot, users: Sequence[str]
) -> dict[str, SeenSwitch]:
    """Returns the users whose switch in Valkey is not the snapshot's, signed for this server.

    Raises `RedisError`.
    """
    behind = {}
    for start in range(0, len(users), USERS_PER_PIPELINE):
        chunk = [
            (user_id, _fields(signer, snapshot, user_id, server))
            for user_id in users[start : start + USERS_PER_PIPELINE]
        ]
        async with client.pipeline(transaction=False) as pipe:
            for user_id, field_names in chunk:
                pipe.hlen(keys.switch(user_id))
                pipe.hmget(keys.switch(user_id), list(field_names))
            there = await replies_of(pipe)
        for (user_id, field_names), count, values in zip(
            chunk, there[::2], there[1::2], strict=True
        ):
            if values is None:  # somebody made another kind of key of it
                behind[user_id] = SeenSwitch(0, b"")
            elif count != len(field_names) or values != [
                value.encode() for value in field_names.values()
            ]:
                fields = dict(zip(field_names, values, strict=True))
                behind[user_id] = SeenSwitch(
                    _version(fields[SWITCH_VERSION]), fields[SWITCH_MAC] or b""
                )
    return behind


def _version(value: bytes | None) -> int:
    number = number_of(value)
    return number if value is None or value == str(number).encode() else _NEVER_OURS


def _fields(
    signer: SwitchSigner, snapshot: SwitchSnapshot, user_id: str, server: str
) -> dict[str, str]:
    """Returns the hash as it should be."""
    version, *words = signer.words(user_id, snapshot.for_user(user_id), server)
    return {SWITCH_VERSION: version, **dict(zip(words[::2], words[1::2], strict=True))}
