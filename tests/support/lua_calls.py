"""Calls Lua scripts as the code does, for one pool and one user."""

from __future__ import annotations

from typing import Any

from infra.valkey.client import text_of
from tests.support.lua_scripts import Scripts
from tests.support.message_signing import switch_words
from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import (
    ADMIT_WORKER,
    ANNOUNCE_WORKER,
    CLAIM,
    ENQUEUE,
    POP,
    RENEW_MARK,
    SET_OWNER,
    SETTLE_CLAIM,
    TAKE_CONNECTION,
)

POOL = "p"
USER = "42"
HOUR_MS = 3_600_000


def now_ms(scripts: Scripts) -> int:
    seconds, micros = scripts.client.time()
    return int(seconds) * 1000 + int(micros) // 1000


def admit_worker(scripts: Scripts, worker: str, reserved: str = "") -> None:
    scripts.run(
        ADMIT_WORKER,
        [
            keys.pool_worker(POOL, worker),
            keys.pool_ready(POOL),
            keys.pool_claim(POOL, reserved),
            keys.pool_born(POOL, reserved),
        ],
        worker,
        reserved,
        3600,
    )


def announce_worker(scripts: Scripts, worker: str, *, reserved: str = "", ttl: int = 30_000) -> Any:
    """Announces and admits a worker, and returns its state."""
    entry = keys.pool_worker(POOL, worker)
    words = ("public_key", f"key of {worker}", "proof", "p", "task", "t", "version", "1")
    state = scripts.run(ANNOUNCE_WORKER, [entry], ttl, *words)
    admit_worker(scripts, worker, reserved)
    return state or text_of(scripts.client.hget(entry, "state"))


def claim_worker(scripts: Scripts, claim_id: str) -> Any:
    return scripts.run(
        CLAIM,
        [keys.pool_ready(POOL), keys.pool_claim(POOL, claim_id)],
        claim_id,
        keys.pool_worker_prefix(POOL),
        3600,
    )


def settle_claim(scripts: Scripts, worker: str, claim_id: str, state: str) -> Any:
    return scripts.run(SETTLE_CLAIM, [keys.pool_worker(POOL, worker)], claim_id, state)


def set_owner(scripts: Scripts, epoch: int = 1, worker: str = "w") -> Any:
    return scripts.run(
        SET_OWNER, [keys.owner(USER), keys.switch(USER)], epoch, worker, "g", *switch_words(USER)
    )


def renew_mark(scripts: Scripts, epoch: int = 1, worker: str = "w") -> Any:
    return scripts.run(
        RENEW_MARK,
        [keys.owner(USER), keys.mark(USER), keys.metadata(USER)],
        epoch,
        worker,
        30_000,
        "task",
        "t",
    )


def enqueue_request(scripts: Scripts, request: str, ttl: int = 30_000) -> Any:
    return scripts.run(
        ENQUEUE,
        [keys.seen(USER, request), keys.requests(USER), keys.doorbell(USER), keys.mark(USER)],
        request,
        f"payload of {request}",
        now_ms(scripts) + ttl,
        HOUR_MS,
        "mac",
    )


BUDGET_OWNER = "person"
CONNECTION_LEASE_MS = 60_000
MAX_CONNECTIONS = 2
CONNECTION_KEYS = [keys.budget(BUDGET_OWNER, name) for name in ("since", "connections", "holders")]


def take_connection(
    scripts: Scripts, connection: str, holder: str, *, known: str = "", fresh: bool = True
) -> Any:
    words = (connection, holder, CONNECTION_LEASE_MS, MAX_CONNECTIONS, 10_000, known, int(fresh))
    return scripts.run(TAKE_CONNECTION, CONNECTION_KEYS, *words)


def pop_request(
    scripts: Scripts,
    number: int,
    *arguments: str,
    epoch: int = 1,
    worker: str = "w",
    session: str = "s",
) -> Any:
    return scripts.run(
        POP,
        [
            keys.owner(USER),
            keys.control(USER),
            keys.requests(USER),
            keys.processing(USER),
            keys.pop(USER),
            keys.switch(USER),
        ],
        epoch,
        worker,
        session,
        number,
        *arguments,
    )
