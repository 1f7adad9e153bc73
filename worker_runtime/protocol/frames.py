"""How a request stands on the queue: `deadline ms|request id|payload`, so that Lua can read the deadline."""

from __future__ import annotations

from dataclasses import dataclass

from worker_runtime.protocol.errors import MalformedMessage


@dataclass(frozen=True, slots=True)
class Frame:
    """One item of a request queue. `raw` is what `answer.lua` and `withdraw.lua` look for."""

    raw: bytes
    deadline_ms: int
    request_id: str
    payload: bytes


def parse(raw: bytes) -> Frame:
    """Takes an item apart; raises `MalformedMessage` if it is no frame."""
    parts = raw.split(b"|", 2)
    # 15 digits of milliseconds reach the year 33658; `int` itself refuses thousands of them with ValueError.
    if len(parts) != 3 or not parts[0].isdigit() or len(parts[0]) > 15 or not parts[1].isascii():
        raise MalformedMessage("a queued item is not `deadline|request|payload`")
    return Frame(raw, int(parts[0]), parts[1].decode("ascii"), parts[2])
