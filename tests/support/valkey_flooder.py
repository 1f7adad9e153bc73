"""Writes into Valkey as fast as it can.

Run as `python -m tests.support.valkey_flooder URL KIND USER WORKER SECONDS`.

It logs in with a worker's own user, or with that of a fleet of job runners: then WORKER is the
fleet's tag. When its connection is ended it tries to log in again, until
its time is over. Prints a line of JSON: the bytes that it sent, and the seconds until it was
refused for good (or null).
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
import time
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

import hiredis

from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys

Command = tuple[str | bytes, ...]

LARGE, SMALL, EVENT = b"x" * 1_000_000, b"x" * 10, b"x" * 250_000


def commands_of(kind: str, user_id: str, worker_id: str) -> Callable[[int], list[Command]]:
    """What one batch holds, by its number."""
    match kind:
        case "large values":
            return lambda n: [("SET", keys.response(user_id, f"made-up-{n}"), LARGE)]
        case "small names":
            return lambda n: [
                ("SET", keys.seen(user_id, f"made-up-{n}-{m}"), SMALL) for m in range(500)
            ]
        case "events":
            bell = ("RPUSH", keys.EVENT_BELL, worker_id)
            return lambda n: [("RPUSH", keys.events_of(worker_id), EVENT), bell]
        case "rings":
            return lambda n: [("RPUSH", keys.EVENT_BELL, LARGE)]
        case "large answers":
            key = keys.response(user_id, "made-up")
            return lambda n: [("SET", key, LARGE), *[("GET", key)] * 20]
        case "one list":
            return lambda n: [("RPUSH", keys.requests(user_id), *[b"made-up"] * 500)]
        case "large job results":
            return lambda n: [("SET", job_keys.result(worker_id, f"made-up-{n}"), LARGE)]
        case "published messages":
            return lambda n: [("PUBLISH", keys.answers("made-up"), LARGE)]
    raise ValueError(kind)


def main(url: str, kind: str, user_id: str, worker_id: str, seconds: float) -> None:
    parts, batch = urlsplit(url), commands_of(kind, user_id, worker_id)
    until, began, sent, refused_at = time.monotonic() + seconds, time.monotonic(), 0, None
    numbers = itertools.count()
    name, password = unquote(parts.username or ""), unquote(parts.password or "")
    login = hiredis.pack_command(("AUTH", name, password))  # type: ignore[arg-type]
    while time.monotonic() < until:
        try:
            with socket.create_connection(
                (parts.hostname or "", parts.port or 0), timeout=10
            ) as link:
                link.sendall(login)
                if not link.recv(64).startswith(b"+OK"):
                    refused_at = refused_at or time.monotonic()
                    time.sleep(0.05)
                    continue
                refused_at = None
                reader = hiredis.Reader()
                while time.monotonic() < until:
                    commands = batch(next(numbers))
                    data = b"".join(hiredis.pack_command(command) for command in commands)  # type: ignore[arg-type]
                    link.sendall(data)
                    sent += len(data)
                    for _ in commands:
                        while (reply := reader.gets()) is False:
                            reader.feed(link.recv(65_536) or _ended())
                        if isinstance(reply, hiredis.ReplyError) and "OOM" not in str(reply):
                            _ended()
        except OSError:
            time.sleep(0.01)
    after = None if refused_at is None else refused_at - began
    sys.stdout.write(json.dumps({"sent": sent, "refused_after": after}) + "\n")


def _ended() -> bytes:
    raise ConnectionError("Valkey has ended the connection")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]))
