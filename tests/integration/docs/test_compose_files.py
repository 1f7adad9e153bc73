"""The configuration files that compose mounts, tried on real servers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.compose import secret_files
from infra.compose.prepare import prepare
from infra.local.process import accepts, free_port
from infra.local.servers import PostgresServer, ValkeyServer
from infra.settings import Settings
from worker_runtime.jobs.protocol.webhook_signing import MIN_KEY_BYTES

FOLDER = Path(__file__).resolve().parents[3] / "infra" / "compose"


class _Postgres(PostgresServer):
    """With the superuser of the PostgreSQL image."""

    user = "postgres"


@pytest.fixture
def secret_folder(tmp_path: Path) -> Path:
    secret_files.write(tmp_path / "secrets")
    return tmp_path / "secrets"


def _mounted(text: str, folder: Path) -> str:
    """A file's text with the container's folder of secrets at another place."""
    return text.replace("/run/secrets", str(folder))


def _psql(server: PostgresServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [server._binary("psql"), "-At", "-h", "127.0.0.1", "-p", str(server.port), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def postgres(server_directory: Path) -> Iterator[PostgresServer]:
    with _Postgres(server_directory / "compose-postgres", durable=False) as server:
        yield server


def test_the_roles_script_makes_two_roles_with_their_passwords(
    postgres: PostgresServer, secret_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "roles.sh"
    script.write_text(_mounted((FOLDER / "postgres-roles.sh").read_text(), secret_folder))
    programs = str(Path(postgres._binary("psql")).parent)
    done = subprocess.run(
        ["/bin/sh", str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "POSTGRES_USER": "postgres",
            "PGHOST": "127.0.0.1",
            "PGPORT": str(postgres.port),
        },
    )
    assert done.returncode == 0, done.stderr
    roles = "select rolname, rolsuper, rolcreatedb from pg_authid where rolname !~ '^(pg_|post)' order by 1"
    assert _psql(postgres, "-U", "postgres", "-c", roles).stdout.split() == ["berth|f|f", "temporal|f|t"]
    owner = "select pg_get_userbyid(datdba) from pg_database where datname = 'berth'"
    assert _psql(postgres, "-U", "postgres", "-c", owner).stdout.strip() == "berth"
    # Two different passwords were set, none of them empty: PostgreSQL keeps a salted verifier of each.
    kept = "select count(distinct rolpassword) from pg_authid where rolpassword like 'SCRAM-SHA-256$%'"
    assert _psql(postgres, "-U", "postgres", "-c", kept).stdout.strip() == "2"


def test_prepare_makes_tables_keys_and_an_administrators_key_once(
    empty_database: str, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    settings = Settings(
        database_url=empty_database,
        master_key_file=private / "master.key",
        master_public_file=tmp_path / "public" / "master.pub",
        orchestrator_key_file=private / "orchestrator.key",
        webhook_key_files=(tmp_path / "jobs" / "webhook.key", tmp_path / "jobs" / "before.key"),
    )
    prepare(settings)
    made = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in made} == {
        *("master.key", "master.pub", "orchestrator.key", "admin.key", "webhook.key"),
    }
    key = settings.webhook_key_files[0]
    assert (key.stat().st_mode & 0o777, len(key.read_bytes().strip()) >= MIN_KEY_BYTES) == (0o600, True)
    prepare(settings)
    assert {path: path.read_bytes() for path in made} == made


def _ask(port: int, *commands: str) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
        link.sendall("".join(f"{command}\r\n" for command in (*commands, "QUIT")).encode())
        return b"".join(iter(lambda: link.recv(65536), b"")).decode()


def test_valkey_starts_with_our_file_and_wants_the_password(secret_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    text = _mounted((FOLDER / "valkey.conf").read_text(), secret_folder)
    text = text.replace("port 6379", f"port {port}").replace("dir /data", f"dir {tmp_path}")
    config = tmp_path / "valkey.conf"
    config.write_text(f"{text}\nbind 127.0.0.1\n")
    password = (secret_folder / "valkey_password.conf").read_text().split()[1]
    url = (secret_folder / "berth_valkey_url").read_text()
    assert re.fullmatch(rf"redis://:{password}@valkey:6379/0\n", url)
    server = subprocess.Popen([str(ValkeyServer._binary()), str(config)], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 20
        while not accepts(port) and time.monotonic() < until:
            assert server.poll() is None
            time.sleep(0.02)
        assert "NOAUTH" in _ask(port, "PING")
        answer = _ask(port, f"AUTH {password}", "CONFIG GET maxmemory-policy", "CONFIG GET appendonly")
        assert "noeviction" in answer
        assert re.search(r"appendonly\r\n\$3\r\nyes", answer)
    finally:
        server.terminate()
        assert server.wait(20) == 0
