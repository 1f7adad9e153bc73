"""Moves events from the workers' own lists to the streams, and admits workers that announce
themselves to their pools.

A worker reaches its own list of events and a bell that all share; only the orchestrator reaches the
streams and the pools. So no worker can delete or delay the events of others, or take others out of
a pool. Each list has a turn in each round. A worker whose list grows all the same is cut off.
Several orchestrators may pump at once: a round is one script, so a kill neither loses nor doubles
an event.

A ring is not authenticated, so it only makes the pump read a list or an entry.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from activities.events.cut_off import Offender, WorkerCutOff
from activities.pool import entries
from activities.pool.entries import PumpedEvents, is_workers_key, pump_events
from activities.pool.launch import launched_for
from infra.database.engine import Database
from infra.database.workers import launches
from infra.process_metrics import REFUSED
from infra.valkey.client import read_hashes, reply_of, text_of
from infra.vault.key_pairs import OrchestratorKeys
from worker_runtime.protocol import keys
from worker_runtime.protocol.authentication import RefusalCounter
from worker_runtime.protocol.errors import BerthError

#: Seconds that rings gather before the next round: those of one order come within a few
#: milliseconds.
RING_GATHER_S = 0.03
#: Events of one worker in a round: a worker that sends more than a thousand a second waits.
MAX_EVENTS_PER_WORKER = 32
#: Rings of a round. If more are left behind them, it is a flood, and they are dropped.
MAX_RINGS_PER_ROUND = 10_000
#: A list of this length that got no shorter in `FLOOD_ROUNDS` rounds, about a second, is a flood.
#: After an outage of ours the list of a busy worker is as long, but gets shorter.
FLOOD_LENGTH = 5_000
FLOOD_ROUNDS = 33
#: Seconds of one wait for a ring; the socket timeout is 5 s.
RING_TIMEOUT_S = 2
#: Seconds between two searches for lists whose ring was lost, and keys of one SCAN.
SWEEP_INTERVAL_S = 60.0
KEYS_PER_SCAN = 1_000
#: Seconds between two searches because rings were dropped, and until an outage is over.
RETRY_INTERVAL_S = 1.0

log = structlog.get_logger()


@dataclass(eq=False, repr=False)
class EventPump:
    """Moves events in rounds (`run`) and notices rings (`attend`); both end only when cancelled."""

    client: Redis
    database: Database
    cutting: WorkerCutOff
    orchestrator_keys: OrchestratorKeys
    _: KW_ONLY
    most_rings: int = MAX_RINGS_PER_ROUND

    def __post_init__(self) -> None:
        self._refused = RefusalCounter(REFUSED.labels("announcement").inc)
        #: Workers with a long list: its length at first, and rounds since then.
        self._long: dict[str, tuple[int, int]] = {}
        self._announced: set[tuple[str, str]] = set()
        self._sweep_at = 0.0
        self._wake = asyncio.Event()

    async def run(self) -> None:
        while True:
            try:
                if await self.step():
                    await asyncio.sleep(RING_GATHER_S)
                else:
                    # The bell onto itself: blocks while it is empty, and changes nothing.
                    bell = keys.EVENT_BELL
                    await reply_of(self.client.blmove(bell, bell, RING_TIMEOUT_S, "LEFT", "LEFT"))
            except (RedisError, OSError) as error:
                log.warning("event_pump_waits", error=type(error).__name__, reason=str(error)[:200])
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def step(self) -> int:
        """Does one round; returns how many rings it took."""
        pumped = await pump_events(
            self.client, rings=self.most_rings, each=MAX_EVENTS_PER_WORKER, long=FLOOD_LENGTH
        )
        now = time.monotonic()
        if (
            pumped.remaining > self.most_rings and self._sweep_at > now + RETRY_INTERVAL_S
        ):  # they were dropped
            log.error("rings_dropped", count=pumped.remaining)
            self._sweep_at = now + RETRY_INTERVAL_S
            self._wake.set()
        if pumped.announced:
            # What does not fit, because of a flood of invented announcements, comes again.
            self._announced.update(pumped.announced[: self.most_rings - len(self._announced)])
            self._wake.set()
        await self._cut_off_floods(pumped)
        return pumped.rings

    async def _cut_off_floods(self, pumped: PumpedEvents) -> None:
        watched = dict(self._long) if pumped.remaining else {}  # some had no turn
        for worker_id, length in pumped.long.items():
            first, rounds = self._long.get(worker_id, (length, 0))
            if rounds < FLOOD_ROUNDS:
                watched[worker_id] = first, rounds + 1
            elif length < first:
                watched[worker_id] = length, 0
            else:
                watched.pop(worker_id, None)
                await self.cutting.cut_off(
                    Offender(worker_id=worker_id), f"floods its events: {length} wait"
                )
        self._long = watched

    async def attend(self) -> None:
        """Admits announced workers, and looks now and then for lists whose ring was lost."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._sweep_at - time.monotonic())):
                    await self._wake.wait()
            self._wake.clear()
            try:
                announced, self._announced = self._announced, set()
                await self.admit(announced)
                if time.monotonic() >= self._sweep_at:
                    self._sweep_at = time.monotonic() + SWEEP_INTERVAL_S
                    await self.sweep()
            except (RedisError, OSError, BerthError) as error:  # workers announce themselves again
                log.warning(
                    "announcements_wait", error=type(error).__name__, reason=str(error)[:200]
                )
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def admit(self, announced: Collection[tuple[str, str]]) -> None:
        """Admits the workers that we launched, that prove their keys and that never had a user.

        A worker's id shows for which claim it was launched.
        """
        names = [keys.pool_worker(pool, worker_id) for pool, worker_id in announced]
        hashes = await read_hashes(self.client, names) if names else []
        reserved: dict[str, dict[str, str]] = defaultdict(dict)
        for (pool, worker_id), fields in zip(announced, hashes, strict=True):
            public_key, proof, claim_id = map(fields.get, (b"public_key", b"proof", b"reserved"))
            if public_key is None or not pool.isprintable():  # it has ended, or there was none
                continue
            proven = is_workers_key(self.orchestrator_keys, worker_id, public_key, proof or b"")
            claim = text_of(claim_id)
            if proven and (not claim or worker_id in launched_for(claim)):
                reserved[pool][worker_id] = claim
            elif self._refused.add(worker_id):
                log.error(
                    "announcement_refused",
                    worker_id=worker_id,
                    pool=pool,
                    count=self._refused.count,
                )
        for pool, claims in reserved.items():
            admissible = await self.database.fetch(launches.never_assigned, pool, claims)
            for worker_id in admissible:
                await entries.admit(self.client, pool, worker_id, claims[worker_id])

    async def sweep(self) -> None:
        """Rings once for each list that exists."""
        cursor, prefix = 0, keys.events_of("")
        while True:
            cursor, names = await reply_of(
                self.client.scan(cursor, match=f"{prefix}*", count=KEYS_PER_SCAN)
            )
            if names:
                rings = [text_of(name)[len(prefix) :] for name in names]
                await reply_of(self.client.rpush(keys.EVENT_BELL, *rings))
            if not cursor:
                return
