"""How claims and workers of the race are called: by numbers, so that millions fit in memory."""

from __future__ import annotations

POOL = "race"
#: What claimers tell the workers: `worker claim`.
DELIVERIES = "race:deliveries"


def worker_id(number: int) -> str:
    """Numbers begin at 1."""
    return f"w{number}"


def number_of(worker: bytes) -> int:
    return int(worker[1:])


def claim_id(claimer: int, number: int) -> str:
    return f"{claimer}-{number}"
