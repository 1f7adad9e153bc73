"""Runs a claimer of the race:
`python -m infra.lab.bench.claim_race.claimer URL LEDGER NUMBER SEED`.

It sends its claims in batches, many of them twice. At times it breaks its connection off before it
has read the replies, and repeats the batch, as somebody does whose reply was lost. Who takes over
after kill -9 does the same. What it got, it tells the workers, at times twice, and of one in 500
never: that claimer has died for good.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

from redis import Redis

from infra.lab.bench.claim_race import claim_ledger
from infra.lab.bench.claim_race.claim_ledger import OPEN, ClaimLedger
from worker_runtime.protocol import keys, scripts

#: Claims under way at once in one process: as many users who come at the same moment.
MAX_CONCURRENT_CLAIMS = 32
#: Share of all batches whose replies are lost.
LOST_REPLY_SHARE = 0.02
#: Share of all messages that are sent twice.
REPEATED_MESSAGE_SHARE = 0.1
#: The number of claims of which one never reaches its worker.
CLAIMS_PER_FORGOTTEN_ONE = 500


def forgotten(claim: int) -> bool:
    return claim % CLAIMS_PER_FORGOTTEN_ONE == CLAIMS_PER_FORGOTTEN_ONE - 1


class Claimer:
    def __init__(self, url: str, ledger: ClaimLedger, number: int, seed: int) -> None:
        self._client = Redis.from_url(url)
        self._ledger = ledger
        self._number = number
        self._dice = random.Random(seed)  # noqa: S311 — nothing secret about it
        #: Claims that two replies gave to different workers.
        self.split = 0

    def run(self) -> None:
        workers = self._ledger.workers
        first = self._ledger.done()
        while first < len(workers):
            batch = range(first, min(first + MAX_CONCURRENT_CLAIMS, len(workers)))
            workers_of = self._claim([claim for claim in batch for _ in range(self._times())])
            if len(workers_of) < len(batch):
                time.sleep(0.002)  # the pool is empty for a moment
            self._deliver(
                [claim for claim in batch if claim in workers_of and not forgotten(claim)],
                workers_of,
            )
            for claim in batch:
                if claim not in workers_of:
                    # The ledger is filled in order;
                    # the rest is claimed again, with the same result.
                    break
                workers[claim] = workers_of[claim]
            first = self._ledger.done()

    def _times(self) -> int:
        return 2 if self._dice.random() < REPEATED_MESSAGE_SHARE else 1

    def _claim(self, claims: list[int]) -> dict[int, int]:
        """Returns the worker of each claim that got one."""
        if self._dice.random() < LOST_REPLY_SHARE:
            self._send_only(claims)
        workers: dict[int, int] = {}
        with self._client.pipeline(transaction=False) as pipe:
            for claim in claims:
                pipe.evalsha(*self._call(claim))
            replies = pipe.execute()
        for claim, reply in zip(claims, replies, strict=True):
            if reply[0] == b"empty":
                continue
            worker = claim_ledger.number_of(reply[1])
            known = self._ledger.workers[claim]
            if workers.setdefault(claim, worker) != worker or known not in (OPEN, worker):
                self.split += 1
        return workers

    def _send_only(self, claims: list[int]) -> None:
        """Sends the commands and reads no reply."""
        connection: Any = self._client.connection_pool.get_connection()
        for claim in claims:
            connection.send_command("EVALSHA", *self._call(claim))
        connection.disconnect()
        self._client.connection_pool.release(connection)

    def _call(self, claim: int) -> list[Any]:
        name = claim_ledger.claim_id(self._number, claim)
        prefix = keys.pool_worker_prefix(claim_ledger.POOL)
        named = [keys.pool_ready(claim_ledger.POOL), keys.pool_claim(claim_ledger.POOL, name)]
        return [scripts.CLAIM.sha, 2, *named, name, prefix, keys.CLAIM_TTL_S]

    def _deliver(self, claims: list[int], workers: dict[int, int]) -> None:
        delivered = [
            f"{workers[claim]} {claim_ledger.claim_id(self._number, claim)}"
            for claim in claims
            for _ in range(self._times())
        ]
        if delivered:
            self._client.rpush(claim_ledger.DELIVERIES, *delivered)


def main() -> int:
    url, path, number, seed = sys.argv[1:]
    with ClaimLedger(Path(path)) as ledger:
        claimer = Claimer(url, ledger, int(number), int(seed))
        claimer.run()
    return 3 if claimer.split else 0


if __name__ == "__main__":
    sys.exit(main())
