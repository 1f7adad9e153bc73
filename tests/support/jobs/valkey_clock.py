"""A step of Valkey's clock, as the queue sees it.

Valkey takes the host's clock, which a test must not touch. Only differences matter, so everything
that Valkey has stored is moved the other way: times in fields and scores, and when keys end.
"""

from __future__ import annotations

from typing import cast

from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.process.valkey import Valkey

_MS = ("due", "queued_at", "started_at", "born_at", "seen_at")


def step(client: Valkey, seconds: float, tag: str = job_keys.FLEET_TAG) -> None:
    """The clock goes ahead by `seconds`, or back if that is negative."""
    ms = round(seconds * 1000)
    prefix = job_keys.meta(tag).removesuffix("meta")
    for raw_key in cast(list[bytes], client.execute("KEYS", prefix.replace("{", "\\{") + "*")):
        key = raw_key.decode()
        kind = key.removeprefix(prefix).partition(":")[0]
        ends = int(client.execute("PEXPIRETIME", key))
        if kind in ("job", "runner"):
            _move_fields(client, key, _MS, ms)
            _move_fields(client, key, ("score",), ms * 1000)
        elif kind == "meta":
            _move_fields(client, key, ("sequence",), ms * 1000)
        elif kind in ("delayed", "failed"):
            _move_scores(client, key, ms)
        elif kind in ("subqueue", "subqueues", "group"):
            _move_scores(client, key, ms * 1000)
        elif kind == "rate":
            free, written = client.execute("GET", key).split()
            client.execute("SET", key, f"{float(free) - ms:.3f} {int(written) - ms}", "KEEPTTL")
        if ends > 0:
            client.execute("PEXPIREAT", key, max(1, ends - ms))


def _move_fields(client: Valkey, key: str, fields: tuple[str, ...], by: int) -> None:
    for field, value in zip(fields, client.execute("HMGET", key, *fields), strict=True):
        if value is not None:
            client.execute("HSET", key, field, round(float(value)) - by)


def _move_scores(client: Valkey, key: str, by: int) -> None:
    for member in client.execute("ZRANGE", key, 0, -1):
        client.execute("ZINCRBY", key, -by, member)
