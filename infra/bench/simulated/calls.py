"""What one worker asks of Valkey, as commands of scripts: single ones now, renewals many at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

from infra.bench.simulated.identity import Identity
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.scripts import MARK, POP, READY, UNMARK, Script


class Call(NamedTuple):
    """One run of a script."""

    script: Script
    keys: list[str]
    args: list[Any]


def announce(config: WorkerConfig, identity: Identity) -> Call:
    """The pool entry of a worker without a user."""
    return Call(
        READY,
        [
            keys.pool_worker(config.pool, config.worker_id),
            keys.pool_ready(config.pool),
            keys.pool_claim(config.pool, config.reserved_claim),
            keys.pool_born(config.pool, config.reserved_claim),
        ],
        [
            config.worker_id,
            int(config.mark_ttl * 1000),
            config.reserved_claim,
            keys.CLAIM_TTL,
            *("public_key", identity.public_key, "proof", identity.proof),
            *("task", config.task_id, "version", config.version),
        ],
    )


def renew(config: WorkerConfig, user_id: str, epoch: int, shown: dict[str, Any]) -> Call:
    """The mark and the metadata of a worker with a user."""
    return Call(
        MARK,
        [keys.owner(user_id), keys.mark(user_id), keys.metadata(user_id)],
        [
            epoch,
            config.worker_id,
            int(config.mark_ttl * 1000),
            *(part for field in shown.items() for part in field),
        ],
    )


def pop(config: WorkerConfig, user_id: str, epoch: int, number: int) -> Call:
    """The next control message or request of the user."""
    return Call(
        POP,
        [
            keys.owner(user_id),
            keys.control(user_id),
            keys.requests(user_id),
            keys.processing(user_id),
            keys.pop(user_id),
            keys.switch(user_id),
        ],
        [epoch, config.worker_id, f"{config.worker_id}:1", number],
    )


def unmark(config: WorkerConfig, user_id: str, epoch: int) -> Call:
    """Takes the mark away at the end."""
    return Call(UNMARK, [keys.mark(user_id), keys.metadata(user_id)], [epoch, config.worker_id])
