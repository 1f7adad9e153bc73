"""Another account of this machine: it connects to no server of the stack and reads no file of the
folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from infra.local.stack import LocalStack
from infra.node.address import reachable
from tests.support.commands import CommandForker

pytestmark = pytest.mark.needs("root")

#: Runs as root until all is imported: the interpreter may lie where others may not go.
_STRANGER = """
import asyncio, asyncpg, encodings.idna, json, os, pwd, socket, sys
asked = json.load(sys.stdin)
nobody = pwd.getpwnam("nobody")
os.setgroups([]); os.setgid(nobody.pw_gid); os.setuid(nobody.pw_uid)

def attempt(action):
    try:
        return action()
    except Exception as error:
        return type(error).__name__

def valkey():
    with socket.create_connection(("127.0.0.1", asked["valkey"]), timeout=5) as link:
        link.sendall(b"CONFIG GET dir\\r\\n")
        return link.recv(100).decode()

def postgres(**how):
    async def connect():
        where = {"host": "127.0.0.1", "port": asked["postgres"]}
        link = await asyncpg.connect(**where, user="berth", database="berth", **how, ssl=False)
        await link.close()
        return "connected"
    return asyncio.run(connect())

def node():
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(asked["node"])
        return "connected"

def read(path):
    try:
        with open(path, "rb") as file:
            file.read(1)
        return True
    except OSError:
        return False

def enter(path):
    try:
        os.listdir(path)
        return True
    except OSError:
        return False

print(json.dumps({
    "valkey": attempt(valkey),
    "postgres": [attempt(postgres), attempt(lambda: postgres(password="berth"))],
    "node": attempt(node),
    "files": [path for path in asked["files"] if read(path)],
    "folders": [path for path in asked["folders"] if enter(path)],
}))
"""


@dataclass(frozen=True)
class Attempts:
    """What `nobody` got."""

    valkey: str
    postgres: list[str]
    node: str
    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    folder = Path(tempfile.mkdtemp(prefix="berth-"))
    folder.chmod(0o755)
    try:
        with LocalStack(folder / "data", pool_target=1, api_processes=1) as stack:
            yield stack
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def attempts(stack: LocalStack) -> Attempts:
    paths = [stack.folder.path, *stack.folder.path.rglob("*")]
    memory = [
        f"/proc/{server.pid}/{name}" for server in stack.servers for name in ("environ", "mem")
    ]
    with reachable(stack.settings.node_socket) as node:
        asked = {
            "valkey": stack.valkey.port,
            "postgres": stack.postgres.port,
            "node": node,
            "files": [str(path) for path in paths if path.is_file()] + memory,
            "folders": [str(path) for path in paths if path.is_dir()],
        }
        done = subprocess.run(
            [sys.executable, "-c", _STRANGER],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=True,
        )
    return Attempts(**json.loads(done.stdout))


def test_it_gets_no_command_through_to_valkey(attempts: Attempts) -> None:
    assert attempts.valkey.startswith("-NOAUTH")


def test_it_does_not_log_in_to_postgres(attempts: Attempts) -> None:
    assert attempts.postgres == ["InvalidPasswordError", "InvalidPasswordError"]


def test_it_does_not_reach_the_node(attempts: Attempts) -> None:
    assert attempts.node == "PermissionError"


def test_it_reads_no_file_and_lists_no_folder(attempts: Attempts) -> None:
    assert attempts.files == []
    assert attempts.folders == []


def test_passwords_are_in_no_process_title_and_no_environment(stack: LocalStack) -> None:
    passwords = [stack.folder.passwords.valkey.encode(), stack.folder.passwords.postgres.encode()]
    shown = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            facts = b"".join(
                Path(f"/proc/{entry}/{name}").read_bytes() for name in ("cmdline", "environ")
            )
        except OSError:
            continue
        if any(password in facts for password in passwords):
            shown.append(facts[:200])
    assert shown == []


def test_no_log_shows_a_password(stack: LocalStack) -> None:
    logs = b"".join(path.read_bytes() for path in stack.folder.path.rglob("*.log"))
    assert stack.folder.passwords.valkey.encode() not in logs
    assert stack.folder.passwords.postgres.encode() not in logs


def test_a_command_on_the_folder_finds_the_password(
    stack: LocalStack, commands: CommandForker
) -> None:
    done = commands.run(
        "jobs",
        "info",
        BERTH_DATA_DIR=str(stack.folder.path),
        BERTH_LOCAL_VALKEY_PORT=str(stack.valkey.port),
    )
    assert done.code == 0, done.err
