"""The fake workers of the race, all in one process:
they announce themselves, confirm claims, and end.

What is confirmed is written down per worker:
this is the truth that the claimers' ledgers are compared with.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from infra.lab.bench.claim_race import claim_ledger
from worker_runtime.protocol import keys, scripts

#: Free workers that are kept in the pool.
FREE_WORKERS = 2000
#: Workers, or messages, that one call adds or takes.
BATCH_SIZE = 500
_MARK_TTL_MS = 3_600_000
_SERVED_TTL_MS = 30_000


@dataclass
class ConfirmedClaims:
    """Holds what the workers themselves know."""

    #: Worker → number of confirmed claims,
    #: and which one was the first: claimer and claim in one number.
    confirmed: array[int] = field(default_factory=lambda: array("q", [0]))
    by: array[int] = field(default_factory=lambda: array("q", [0]))
    repeated: int = 0
    released: int = 0

    @property
    def announced(self) -> int:
        return len(self.confirmed) - 1


class FakeWorkers:
    def __init__(self, client: Redis, keep: int = FREE_WORKERS) -> None:
        self._client = client
        self._keep = keep
        self.truth = ConfirmedClaims()

    def serve(self, going: Callable[[], bool]) -> None:
        """Serves until no claimer is left and every message was taken."""
        while True:
            last = not going()
            self._fill()
            if not self._take() and last:
                return

    def _fill(self) -> None:
        free: Any = self._client.zcard(keys.pool_ready(claim_ledger.POOL))
        missing = self._keep - int(free)
        if missing >= min(BATCH_SIZE, self._keep):
            self.announce(missing)

    def announce(self, count: int) -> None:
        """Announces `count` new free workers."""
        with self._client.pipeline(transaction=False) as pipe:
            for _ in range(count):
                number = len(self.truth.confirmed)
                self.truth.confirmed.append(0)
                self.truth.by.append(0)
                pipe.evalsha(*_announce(number))
                pipe.evalsha(*_admit(number))
            pipe.execute()

    def _take(self) -> int:
        """Takes some messages, as each worker takes its own; returns how many."""
        delivered: Any = self._client.lpop(claim_ledger.DELIVERIES, BATCH_SIZE) or []
        if not delivered:
            return 0
        pairs = [
            (int(worker), claim.decode())
            for worker, claim in (message.split() for message in delivered)
        ]
        with self._client.pipeline(transaction=False) as pipe:
            for worker, claim in pairs:
                pipe.evalsha(*_settle(worker, claim, "confirmed"))
            states = pipe.execute()
        ended = []
        for (worker, claim), state in zip(pairs, states, strict=True):
            if state == b"confirmed":
                self._confirm(worker, claim)
                ended.append(worker)
        # From now on it renews a mark, and its entry expires.
        with self._client.pipeline(transaction=False) as pipe:
            for worker in set(ended):
                pipe.pexpire(
                    keys.pool_worker(claim_ledger.POOL, claim_ledger.worker_id(worker)),
                    _SERVED_TTL_MS,
                )
            pipe.execute()
        return len(delivered)

    def _confirm(self, worker: int, claim: str) -> None:
        claimer, _, number = claim.partition("-")
        value = (int(claimer) << 40) + int(number) + 1
        if self.truth.confirmed[worker] and self.truth.by[worker] == value:
            self.truth.repeated += (
                1  # the same message twice: the worker answers again and does nothing
            )
            return
        self.truth.confirmed[worker] += 1
        self.truth.by[worker] = value

    def release(self, pairs: list[tuple[int, str]]) -> int:
        """Ends claims that nobody confirmed; then their messages arrive after all, too late."""
        late = 0
        for start in range(0, len(pairs), BATCH_SIZE):
            batch = pairs[start : start + BATCH_SIZE]
            with self._client.pipeline(transaction=False) as pipe:
                for outcome in ("released", "confirmed"):
                    for worker, claim in batch:
                        pipe.evalsha(*_settle(worker, claim, outcome))
                states = pipe.execute()
            self.truth.released += sum(state == b"released" for state in states[: len(batch)])
            late += sum(state == b"confirmed" for state in states[len(batch) :])
        return late


def _announce(number: int) -> list[Any]:
    entry = keys.pool_worker(claim_ledger.POOL, claim_ledger.worker_id(number))
    fields = ("public_key", "k", "proof", "p", "task", "t", "version", "v")
    return [scripts.ANNOUNCE_WORKER.sha, 1, entry, _MARK_TTL_MS, *fields]


def _admit(number: int) -> list[Any]:
    """Admits a worker as the orchestrator does once it has announced itself."""
    worker = claim_ledger.worker_id(number)
    entry, free = keys.pool_worker(claim_ledger.POOL, worker), keys.pool_ready(claim_ledger.POOL)
    unused = keys.pool_claim(claim_ledger.POOL, ""), keys.pool_born(claim_ledger.POOL, "")
    return [scripts.ADMIT_WORKER.sha, 4, entry, free, *unused, worker, "", keys.CLAIM_TTL_S]


def _settle(worker: int, claim: str, outcome: str) -> list[Any]:
    entry = keys.pool_worker(claim_ledger.POOL, claim_ledger.worker_id(worker))
    return [scripts.SETTLE_CLAIM.sha, 1, entry, claim, outcome]
