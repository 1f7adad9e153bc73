"""*sealed*: a user's secret is found nowhere but at the broker, and the stack's keys only in their
files."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from sqlalchemy import text
from temporalio.api.common.v1 import Payload
from temporalio.client import Client

from infra.database.engine import Database
from infra.lab.processes import processes_of
from infra.temporal.codec import data_converter
from tests.support.systems.local import RunningSystem, until
from tests.support.systems.secrets import contains_secret, read_stack_secrets

#: All data is searched, and every history.
pytestmark = pytest.mark.timeout(120)

#: Another one in each run: files of an earlier run may still lie about.
CANARY = f"canary-{uuid4().hex[:12]}"
#: Folders that all processes of a machine share.
SHARED = {"/tmp", "/var/tmp", "/dev/shm", tempfile.gettempdir()}  # noqa: S108
#: Bytes; a larger file in them is no note that a program left.
NOTE = 32 * 1024 * 1024
#: Files of the data folder that hold its keys and passwords.
KEEPERS = re.compile(r"/(keys/.+|run/[\w-]+\.secrets/\w+|postgres/pgpass|valkey/valkey\.conf)$")


def _valkey_dump(system: RunningSystem) -> bytes:
    """Every key with its value, of any type; DUMP alone may be compressed."""
    values: list[bytes] = []
    with system.valkey() as client:
        for key in client.scan_iter(count=1000):
            values += [key, client.dump(key) or b"", *_plain(client, key)]
    return b"\n".join(values)


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
            return [
                part for _, entry in client.xrange(key) for pair in entry.items() for part in pair
            ]
        case b"none":
            return []
        case other:
            raise AssertionError(f"{key!r} is a {other!r}")


async def _database_text(system: RunningSystem) -> str:
    database = Database(system.stack.settings.database_url, pool_size=1)
    dump = ""
    async with database.session() as session:
        tables = (
            await session.scalars(
                text(
                    "select table_name from information_schema.tables where table_schema = 'public'"
                )
            )
        ).all()
        for table in tables:
            rows = await session.scalars(text(f"select t::text from {table} t"))  # noqa: S608
            dump += "\n".join(rows)
    await database.close()
    return dump


async def _histories(system: RunningSystem) -> bytes:
    """All workflow histories, with what each workflow shows of itself, as they are and
    decrypted."""
    codec = data_converter(system.stack.settings).payload_codec
    assert codec is not None
    client = await Client.connect(system.stack.temporal.address)
    texts, payloads = [], []
    async for workflow in client.list_workflows():
        history = await client.get_workflow_handle(
            workflow.id, run_id=workflow.run_id
        ).fetch_history()
        shown = [MessageToDict(workflow.raw_info), history.to_json_dict()]
        texts.append(json.dumps(shown).encode())
        payloads += list(_payloads(shown))
    assert any(b'"user-worker-' in shown for shown in texts)
    decoded = await codec.decode(payloads)
    return b"\n".join([*texts, *(payload.data for payload in decoded)])


def _payloads(shown: Any) -> Iterator[Payload]:
    """Every payload in what Temporal shows as JSON."""
    if isinstance(shown, dict):
        if "encoding" in shown.get("metadata", {}):
            yield ParseDict(shown, Payload())
        for part in shown.values():
            yield from _payloads(part)
    elif isinstance(shown, list):
        for part in shown:
            yield from _payloads(part)


def _pids(system: RunningSystem) -> set[int]:
    """Every process of the stack; workers have other parents."""
    ours = {server.pid for server in system.stack.servers}
    ours |= {
        child.pid for pid in set(ours) for child in psutil.Process(pid).children(recursive=True)
    }
    return ours | {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "worker_runtime" in " ".join(process.info["cmdline"] or [])
    }


def _processes(system: RunningSystem) -> bytes:
    """Environment and command line of every process of the stack."""
    contents = b""
    for pid in _pids(system):
        for name in ("environ", "cmdline"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                contents += Path(f"/proc/{pid}/{name}").read_bytes()
    assert str(system.stack.folder.path).encode() in contents
    return contents


def _notes(system: RunningSystem, since: float) -> dict[str, bytes]:
    """Files in the machine's shared folders that were written since then, by whomever."""
    contents = {}
    for entry in itertools.chain.from_iterable(map(os.scandir, SHARED)):
        with contextlib.suppress(OSError):
            top = Path(entry.path)
            if top.is_symlink() or top.lstat().st_mtime < since:
                continue
            for path in _files(top) if top.is_dir() else [top]:
                with contextlib.suppress(OSError):
                    about, ours = path.stat(), path.is_relative_to(system.stack.folder.path)
                    if not ours and about.st_mtime >= since and about.st_size < NOTE:
                        contents[str(path)] = path.read_bytes()
    return contents


def _folder(system: RunningSystem) -> dict[str, bytes]:
    """What the data folder holds. The exchange's own folder is the broker: it knows its customers'
    keys."""
    contents = {}
    for path in _files(system.stack.folder.path):
        if "exchange" not in path.relative_to(system.stack.folder.path).parts:
            with contextlib.suppress(FileNotFoundError):  # servers take files away while we read
                contents[str(path)] = path.read_bytes()
    return contents


def test_a_users_secret_is_found_nowhere(system: RunningSystem) -> None:
    began = time.time()
    trader = system.trader(api_key=f"{CANARY}-key", secret_key=f"{CANARY}-secret")
    assert system.order(trader).status_code == 201
    wrong = system.trader(api_key=f"{CANARY}-other", wrong_key=True, secret_key=f"{CANARY}-secret")
    assert system.order(wrong).json()["code"] == "LOGIN_REJECTED"
    reload = f"/v1/users/{trader.user_id}/worker/reload-credentials"
    assert system.call("POST", reload, trader.api_key).status_code == 202
    refused = system.call(
        "PUT",
        f"/v1/users/{trader.user_id}/accounts/{trader.account_id}/credentials",
        trader.api_key,
        json={"broker": "nonsense", "api_key": f"{CANARY}-typed", "secret_key": CANARY},
    )
    assert refused.status_code == 422
    assert CANARY not in refused.text

    places = {
        "valkey": _valkey_dump(system),
        "database": asyncio.run(_database_text(system)).encode(),
        "histories": asyncio.run(_histories(system)),
        "processes": _processes(system),
    }
    places |= _folder(system) | _notes(system, began)
    assert _holding(places, CANARY) == []

    # The same search finds what must be there: it does look where a secret would be.
    seen = _holding(places, trader.user_id)
    assert {"valkey", "database", "histories"} <= set(seen)
    assert any(name.endswith(".log") for name in seen), seen


def test_the_stacks_own_secrets_are_in_their_files_only(system: RunningSystem) -> None:
    began = time.time()
    system.start_until_active(system.trader())
    own = read_stack_secrets(system)
    folder = {
        name: content for name, content in _folder(system).items() if "/postgres/data/" not in name
    }
    places = {
        "valkey": _valkey_dump(system),
        "database": asyncio.run(_database_text(system)).encode(),
        "histories": asyncio.run(_histories(system)),
        "processes": _processes(system),
        **{name: content for name, content in folder.items() if not KEEPERS.search(name)},
        **_notes(system, began),
    }
    leaks = {
        (name, secret)
        for name, content in places.items()
        for secret in own
        if contains_secret(content, own[secret])
    }
    assert leaks == set()
    kept = b"\n".join(content for name, content in folder.items() if KEEPERS.search(name))
    # The search finds them.
    assert [name for name, secret in own.items() if not contains_secret(kept, secret)] == []
    # Only their owner reads them, whatever the modes of the folders above are.
    exposed = []
    for path in _files(system.stack.folder.path):
        with contextlib.suppress(FileNotFoundError):  # servers take files away while we look
            if path.suffix != ".pub" and path.stat().st_mode & 0o077:
                exposed.append(str(path))
    assert exposed == []


def test_what_crashes_leaves_no_core_file(system: RunningSystem) -> None:
    """The stack was started where core files have no limit."""
    worker = system.start_until_active(system.trader(secret_key=f"{CANARY}-core"))
    for pid in _pids(system):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            [limit] = re.findall(
                r"Max core file size +(\S+)", Path(f"/proc/{pid}/limits").read_text()
            )
            assert limit in {"0", "1"}, Path(f"/proc/{pid}/cmdline").read_bytes()
    orchestrator, api = system.stack.orchestrator, psutil.Process(system.stack.api.pid)
    served = next(child for child in api.children() if "api.processes.server" in child.cmdline())
    session = psutil.Process(processes_of(worker["worker_id"]).session)
    homes = {Path(process.cwd()) for process in (served, session, psutil.Process(orchestrator.pid))}
    before = {path for home in homes for path in home.glob("core*")}
    for process in (served, session):
        process.send_signal(signal.SIGABRT)
        until(lambda process=process: not _lives(process), f"end of {process}")  # type: ignore[misc]
    orchestrator.stop(signal.SIGSEGV)
    assert {path for home in homes for path in home.glob("core*")} == before


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _files(folder: Path) -> Iterator[Path]:
    """All files below; folders may vanish meanwhile."""
    for name, _, files in os.walk(folder):
        yield from (path for file_name in files if (path := Path(name, file_name)).is_file())


def _holding(places: dict[str, bytes], secret: str) -> list[str]:
    return [name for name, content in places.items() if secret.encode() in content]
