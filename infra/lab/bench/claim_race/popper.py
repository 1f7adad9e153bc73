"""Takes workers as fast as it can:
`python -m infra.lab.bench.claim_race.popper URL claim|pop FIRST COUNT`.

Waits for a token, so that all begin together; prints the seconds that it took.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from redis import Redis

from infra.lab.bench.claim_race import claim_ledger
from infra.lab.bench.claim_race.claimer import MAX_CONCURRENT_CLAIMS
from worker_runtime.protocol import keys, scripts

GO = "race:go"


def pop_command(act: str, number: int) -> list[Any]:
    if act == "pop":
        return ["ZPOPMIN", keys.pool_ready(claim_ledger.POOL)]
    named = [keys.pool_ready(claim_ledger.POOL), keys.pool_claim(claim_ledger.POOL, f"p-{number}")]
    prefix = keys.pool_worker_prefix(claim_ledger.POOL)
    return ["EVALSHA", scripts.CLAIM.sha, 2, *named, f"p-{number}", prefix, keys.CLAIM_TTL_S]


def main() -> int:
    url, act, first, count = sys.argv[1:]
    client = Redis.from_url(url, socket_timeout=None)  # the others may start much later
    client.blpop([GO])
    began = time.monotonic()
    for start in range(int(first), int(first) + int(count), MAX_CONCURRENT_CLAIMS):
        with client.pipeline(transaction=False) as pipe:
            for number in range(start, min(start + MAX_CONCURRENT_CLAIMS, int(first) + int(count))):
                commands: Any = pipe
                commands.execute_command(*pop_command(act, number))
            if any(not reply or reply[0] == b"empty" for reply in pipe.execute()):
                return 3
    sys.stdout.write(f"{time.monotonic() - began}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
