"""Takes workers as fast as it can: `python -m infra.bench.racing.popper URL claim|pop FIRST COUNT`.

Waits for a token, so that all begin together; prints the seconds that it took.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from redis import Redis

from infra.bench.racing import names
from infra.bench.racing.claimer import BATCH
from worker_runtime.protocol import keys, scripts

GO = "race:go"


def call(what: str, number: int) -> list[Any]:
    if what == "pop":
        return ["ZPOPMIN", keys.pool_ready(names.POOL)]
    named = [keys.pool_ready(names.POOL), keys.pool_claim(names.POOL, f"p-{number}")]
    prefix = keys.pool_worker_prefix(names.POOL)
    return ["EVALSHA", scripts.CLAIM.sha, 2, *named, f"p-{number}", prefix, keys.CLAIM_TTL]


def main() -> int:
    url, what, first, count = sys.argv[1:]
    client = Redis.from_url(url)
    client.blpop([GO])
    began = time.monotonic()
    for start in range(int(first), int(first) + int(count), BATCH):
        with client.pipeline(transaction=False) as pipe:
            for number in range(start, min(start + BATCH, int(first) + int(count))):
                commands: Any = pipe
                commands.execute_command(*call(what, number))
            if any(not reply or reply[0] == b"empty" for reply in pipe.execute()):
                return 3
    sys.stdout.write(f"{time.monotonic() - began}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
