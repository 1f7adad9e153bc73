"""Reads and writes a pool in Valkey: the entries of its workers, and the wait queue of users who
asked for a worker while the pool may not grow.

The wait queue serves users in the order in which they came. A user keeps their position by asking
again within `WAIT_QUEUE_TTL_S`; asking more often does not improve it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from redis.asyncio import Redis

from infra.valkey import client as valkey
from infra.valkey.client import reply_of, text_of
from infra.valkey.memory import REFUSED_ABOVE_PERMILLE
from infra.vault.key_pairs import OrchestratorKeys
from worker_runtime.protocol import keys, scripts, sealing
from workflows.user_worker.messages import WorkerRef

#: Seconds after which a user who does not ask again leaves the wait queue; six times the wait of
#: `POOL_EXHAUSTED`.
WAIT_QUEUE_TTL_S = 30.0
#: Events that are taken at a worker's end at once. The rest waits for the next round.
MAX_LAST_EVENTS = 1000
MAX_LAST_EVENT_BYTES = 4 * 1024 * 1024
#: Bytes of one worker's events that are taken in a round: 2 MB a second of a flood. An order makes
#: four events of 0.5 KB.
MAX_EVENT_BYTES_PER_ROUND = 65_536


async def join_wait_queue(client: Redis, pool: str, user_id: str) -> int:
    """Returns the user's position in the wait queue, 0 for the first. Adds a new user at the
    end."""
    reply = await valkey.run_script(
        client,
        scripts.JOIN_WAIT_QUEUE,
        [keys.pool_wait_queue(pool), keys.pool_last_asked(pool)],
        [user_id, int(WAIT_QUEUE_TTL_S * 1000)],
    )
    return int(reply)


async def leave_wait_queue(client: Redis, pool: str, user_id: str) -> None:
    async with client.pipeline(transaction=True) as pipe:
        pipe.zrem(keys.pool_wait_queue(pool), user_id)
        pipe.zrem(keys.pool_last_asked(pool), user_id)
        await pipe.execute()


class EntryStatus(StrEnum):
    """Says which worker a claim gets.

    `claim.lua` returns `CLAIMED` to `GONE`. The claim itself (`activities/claims/claim.py`) uses
    the others, and also `GONE` and `EMPTY`, without asking the pool.
    """

    #: A worker of the pool.
    CLAIMED = "claimed"
    #: The worker that this claim got before.
    AGAIN = "again"
    #: No worker: none is ready, other users wait for those that are, or too many entries were
    #: invalid.
    EMPTY = "empty"
    #: No worker, since the server's memory is short.
    FULL = "full"
    #: This claim's worker is dead or has another claim by now, or a worker of the user has to be
    #: ended first.
    GONE = "gone"
    #: No worker: the user has no account to log in with, or too many of their workers crashed.
    REFUSED = "refused"
    #: The worker that the user still has, and keeps.
    ADOPTED = "adopted"
    #: No worker: there is none to adopt, and no other was asked for.
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class PoolEntry:
    """Holds the worker that a claim gets, and the public key that the worker announced."""

    status: EntryStatus
    worker_id: str = ""
    public_key: bytes = b""
    proof: bytes = b""

    def proven(self, orchestrator_keys: OrchestratorKeys) -> bool:
        """Returns True if the public key is the worker's own (`is_workers_key`)."""
        return is_workers_key(orchestrator_keys, self.worker_id, self.public_key, self.proof)


def is_workers_key(
    orchestrator_keys: OrchestratorKeys, worker_id: str, public_key: bytes, proof: bytes
) -> bool:
    """Returns True if the public key can be sealed to and is the worker's own: only its launch
    token could make the proof."""
    return any(
        sealing.check_key(token, worker_id, public_key, proof)
        for token in orchestrator_keys.launch_tokens(worker_id)
    ) and sealing.is_usable_key(public_key)


async def claim_entry(
    client: Redis,
    pool: str,
    claim_id: str,
    user_id: str = "",
    *,
    avoid: str = "",
    refused: Iterable[str] = (),
) -> PoolEntry:
    """Takes the longest-ready worker for this claim; a repeat returns the same one.

    With `user_id`, leaves workers of version `avoid` in the pool, drops those in `refused`, and
    takes none while users ahead in the wait queue need every ready worker.
    """
    key_names = [keys.pool_ready(pool), keys.pool_claim(pool, claim_id)]
    args: list[Any] = [claim_id, keys.pool_worker_prefix(pool), keys.CLAIM_TTL_S]
    if user_id:
        key_names += [keys.pool_wait_queue(pool), keys.pool_last_asked(pool)]
        args += [user_id, int(WAIT_QUEUE_TTL_S * 1000), avoid, REFUSED_ABOVE_PERMILLE, *refused]
    status, *fields = await valkey.run_script(client, scripts.CLAIM, key_names, args)
    # 'empty' names none, 'gone' only a worker.
    worker_id, public_key, proof = (*fields, None, None, None)[:3]
    return PoolEntry(
        status=EntryStatus(text_of(status)),
        worker_id=text_of(worker_id),
        public_key=public_key or b"",
        proof=proof or b"",
    )


async def admit(client: Redis, pool: str, worker_id: str, claim_id: str) -> None:
    """Makes an announced worker free, or with `claim_id` that claim's worker."""
    key_names = [
        keys.pool_worker(pool, worker_id),
        keys.pool_ready(pool),
        keys.pool_claim(pool, claim_id),
        keys.pool_born(pool, claim_id),
    ]
    await valkey.run_script(
        client, scripts.ADMIT_WORKER, key_names, [worker_id, claim_id, keys.CLAIM_TTL_S]
    )


async def write_owner(
    client: Redis, user_id: str, worker: WorkerRef, generation: str, switch: Sequence[str]
) -> bool:
    """Makes the worker the user's owner and writes the switch (`SwitchSigner.words`).

    To fence a user's last worker, the caller passes a newer epoch and a worker that does not exist
    (`activities/claims/stop.py`: `WorkerTerminator.fence`). Returns False if a later worker is the
    owner.
    """
    result = await valkey.run_script(
        client,
        scripts.SET_OWNER,
        [keys.owner(user_id), keys.switch(user_id)],
        [worker.epoch, worker.worker_id, generation, *switch],
    )
    return text_of(result) == "ok"


async def release_claim(client: Redis, pool: str, worker_id: str, claim_id: str) -> str:
    """Ends a claim that the worker has not confirmed; returns 'released', 'confirmed' or
    'unknown'."""
    state = await valkey.run_script(
        client, scripts.SETTLE_CLAIM, [keys.pool_worker(pool, worker_id)], [claim_id, "released"]
    )
    return text_of(state)


async def discard_entry(client: Redis, pool: str, worker_id: str, claim_id: str) -> None:
    """Takes a claim back from an entry that may not be claimed, and removes that entry."""
    key_names = [keys.pool_claim(pool, claim_id), keys.pool_worker(pool, worker_id)]
    await valkey.run_script(client, scripts.DISCARD_ENTRY, key_names, [claim_id, worker_id])


async def worker_of_claim(client: Redis, pool: str, claim_id: str) -> str:
    """Returns the worker that this claim got, or ''."""
    return text_of(await reply_of(client.get(keys.pool_claim(pool, claim_id))))


async def claim_of_worker(client: Redis, pool: str, worker_id: str) -> str:
    """Returns the claim that holds this worker by its pool entry, or ''."""
    return text_of(await reply_of(client.hget(keys.pool_worker(pool, worker_id), "claim")))


async def is_alive(client: Redis, pool: str, worker_id: str, user_id: str, epoch: int) -> bool:
    """Returns True if the worker has its pool entry or, once it belongs to the user, its mark."""
    async with client.pipeline(transaction=False) as pipe:
        pipe.exists(keys.pool_worker(pool, worker_id))
        pipe.get(keys.mark(user_id))
        entry, mark = await pipe.execute()
    return bool(entry) or mark == f"{epoch}:{worker_id}".encode()


async def remove_entry(client: Redis, pool: str, worker_id: str) -> None:
    """Removes an ended worker from the pool, so that nobody claims it. Call it only after the end
    is confirmed.

    Moves the worker's last events first, so that what follows from the end comes after them.
    """
    await pump_events(client, worker_id, each=MAX_LAST_EVENTS, each_bytes=MAX_LAST_EVENT_BYTES)
    async with client.pipeline(transaction=True) as pipe:
        pipe.zrem(keys.pool_ready(pool), worker_id)
        pipe.delete(keys.pool_worker(pool, worker_id), keys.pool_inbox(pool, worker_id))
        await pipe.execute()


async def remove_mark(client: Redis, user_id: str, value: str | bytes) -> bool:
    """Removes the user's mark and its metadata, if the mark has this value. Without this call the
    mark would stay for up to 30 s."""
    key_names = [keys.mark(user_id), keys.metadata(user_id)]
    return bool(await valkey.run_script(client, scripts.REMOVE_MARK, key_names, [value]))


class PumpedEvents(NamedTuple):
    """Holds what `pump_events.lua` returned."""

    #: Rings that were taken, and that were left behind them.
    rings: int
    remaining: int
    #: Pool and id of workers that want to join.
    announced: list[tuple[str, str]]
    #: Worker → length, of lists that are too long.
    long: dict[str, int]


async def pump_events(
    client: Redis,
    worker_id: str = "",
    *,
    each: int,
    rings: int = 0,
    long: int = 0,
    each_bytes: int = MAX_EVENT_BYTES_PER_ROUND,
) -> PumpedEvents:
    """Moves events to the streams: of this worker, and of the workers that up to `rings` rings
    name.

    `each`, `each_bytes`: most events and bytes of one worker. `long`: a list that is longer is
    reported in `PumpedEvents.long`.
    """
    args = [keys.events_of(""), each, rings, long, worker_id, each_bytes]
    taken, remaining, announced, lengths = await valkey.run_script(
        client, scripts.PUMP_EVENTS, [keys.EVENTS, keys.EVENT_BELL, keys.CHANGES], args
    )
    pairs = (text_of(ring).rpartition(" ") for ring in announced)
    long_lists = dict(zip(map(text_of, lengths[::2]), lengths[1::2], strict=True))
    return PumpedEvents(
        taken, remaining, [(pool, joining) for pool, _, joining in pairs], long_lists
    )
