"""*sealed*: a user's secret is found nowhere but at the broker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import text

from infra.database.engine import Database
from tests.e2e.conftest import House

CANARY = "canary-7f3a9c51"


def _valkey_dump(house: House) -> bytes:
    """Every key with its value, of any type; DUMP alone may be compressed."""
    found: list[bytes] = []
    with house.valkey() as client:
        for key in client.scan_iter(count=1000):
            found += [key, client.dump(key) or b"", *_plain(client, key)]
    return b"\n".join(found)


def _plain(client: Any, key: bytes) -> list[bytes]:
    """A key's value as it is; nothing if it has just expired. An unknown type fails the test."""
    match client.type(key):
        case b"string":
            return [client.get(key) or b""]
        case b"list":
            return list(client.lrange(key, 0, -1))
        case b"hash":
            return [part for pair in client.hgetall(key).items() for part in pair]
        case b"set":
            return list(client.smembers(key))
        case b"zset":
            return [member for member, _ in client.zrange(key, 0, -1, withscores=True)]
        case b"stream":
            return [part for _, entry in client.xrange(key) for pair in entry.items() for part in pair]
        case b"none":
            return []
        case other:
            raise AssertionError(f"{key!r} is a {other!r}")


async def _database_text(house: House) -> str:
    database = Database(house.stack.settings.database_url, pool_size=1)
    found = ""
    async with database.session() as session:
        tables = (
            await session.scalars(
                text("select table_name from information_schema.tables where table_schema = 'public'")
            )
        ).all()
        for table in tables:
            rows = await session.scalars(text(f"select t::text from {table} t"))  # noqa: S608
            found += "\n".join(rows)
    await database.close()
    return found


def _histories(house: House) -> bytes:
    """All workflow histories, as an operator exports them."""
    temporal = str(Path(sys.executable).with_name("temporal"))
    address = ["--address", house.stack.temporal.address]
    listed = subprocess.run(
        [temporal, "workflow", "list", *address, "-o", "jsonl"], capture_output=True, check=True, timeout=30
    )
    found = listed.stdout
    names = {
        json.loads(line)["execution"]["workflowId"] for line in listed.stdout.splitlines() if line.strip()
    }
    assert any(name.startswith("user-worker-") for name in names)
    for name in names:
        shown = subprocess.run(
            [temporal, "workflow", "show", *address, "-w", name, "-o", "json"],
            capture_output=True,
            check=True,
            timeout=30,
        )
        found += shown.stdout
    return found


def _processes(house: House) -> bytes:
    """Environment and command line of every process of the stack."""
    found = b""
    marker = str(house.stack.folder.path)
    ours = {server.pid for server in house.stack.servers}
    ours |= {child.pid for pid in set(ours) for child in psutil.Process(pid).children(recursive=True)}
    ours |= {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "worker_runtime" in " ".join(process.info["cmdline"] or [])
    }
    for pid in ours:
        for name in ("environ", "cmdline"):
            try:
                found += Path(f"/proc/{pid}/{name}").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
    assert marker.encode() in found
    return found


def test_a_users_secret_is_found_nowhere(house: House) -> None:
    trader = house.trader(api_key=f"{CANARY}-key", secret_key=f"{CANARY}-secret")
    assert house.order(trader).status_code == 201
    wrong = house.trader(api_key=f"{CANARY}-other", wrong_key=True, secret_key=f"{CANARY}-secret")
    assert house.order(wrong).json()["code"] == "LOGIN_REJECTED"
    reload = f"/v1/users/{trader.user_id}/worker/reload-credentials"
    assert house.call("POST", reload, trader.api_key).status_code == 202
    refused = house.call(
        "PUT",
        f"/v1/users/{trader.user_id}/accounts/{trader.account_id}/credentials",
        trader.api_key,
        json={"broker": "nonsense", "api_key": f"{CANARY}-typed", "secret_key": CANARY},
    )
    assert refused.status_code == 422
    assert CANARY not in refused.text

    places = {
        "valkey": _valkey_dump(house),
        "database": asyncio.run(_database_text(house)).encode(),
        "histories": _histories(house),
        "processes": _processes(house),
    }
    # The exchange's own folder is the broker: it knows its customers' keys.
    for path in _files(house.stack.folder.path):
        if "exchange" not in path.parts:
            with contextlib.suppress(FileNotFoundError):  # servers take files away while we read
                places[str(path)] = path.read_bytes()
    assert _holding(places, CANARY) == []

    # The same search finds what must be there: it does look where a secret would be.
    seen = _holding(places, trader.user_id)
    assert {"valkey", "database", "histories"} <= set(seen)
    assert any(name.endswith(".log") for name in seen), seen


def _files(folder: Path) -> Iterator[Path]:
    """All files below; folders may vanish meanwhile."""
    for name, _, files in os.walk(folder):
        yield from (path for one in files if (path := Path(name, one)).is_file())


def _holding(places: dict[str, bytes], wanted: str) -> list[str]:
    return [name for name, content in places.items() if wanted.encode() in content]
