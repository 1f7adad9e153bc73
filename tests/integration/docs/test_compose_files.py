"""The configuration files that compose mounts, tried on real servers."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.compose import secret_files
from infra.compose.prepare import prepare, split_provider_secrets
from infra.database.migrate import migrate, migrate_as_owner
from infra.local.process import accepts, free_port
from infra.local.servers import PostgresServer, ValkeyServer
from infra.settings import Settings
from infra.vault import key_file

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
        [server.program("psql"), "-At", "-h", "127.0.0.1", "-p", str(server.port), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def postgres(server_directory: Path) -> Iterator[PostgresServer]:
    with _Postgres(server_directory / "compose-postgres", durable=False) as server:
        yield server


def _refused(server: PostgresServer, database: str, statement: str) -> bool:
    done = _psql(server, "-U", "berth", "-d", database, "-c", statement)
    return done.returncode != 0 and "must be owner" in done.stderr


def _migrated(server: PostgresServer, database: str) -> None:
    """As `prepare` does it, and what `berth` may do then."""
    url = f"postgresql+asyncpg://{{}}@127.0.0.1:{server.port}/{database}"
    settings = Settings(
        database_owner_url=url.format("berth_owner"), database_url=url.format("berth")
    )
    asyncio.run(migrate_as_owner(settings))
    assert _psql(
        server, "-U", "berth", "-d", database, "-c", "insert into users (id) values ('a')"
    ).stdout
    for statement in ("drop table orders", "alter table audit_trail disable trigger all"):
        assert _refused(server, database, statement)


def test_the_roles_script_makes_roles_with_their_passwords_and_the_tables_belong_to_one_of_its_own(
    postgres: PostgresServer, secret_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "roles.sh"
    script.write_text(_mounted((FOLDER / "postgres-roles.sh").read_text(), secret_folder))
    programs = str(Path(postgres.program("psql")).parent)
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
    roles = (
        "select rolname, rolsuper, rolcreatedb from pg_authid where rolname !~ "
        "'^(pg_|post)' order by 1"
    )
    assert _psql(postgres, "-U", "postgres", "-c", roles).stdout.split() == [
        "berth|f|f",
        "berth_owner|f|f",
        "temporal|f|t",
    ]
    owner = "select pg_get_userbyid(datdba) from pg_database where datname = 'berth'"
    assert _psql(postgres, "-U", "postgres", "-c", owner).stdout.strip() == "berth_owner"
    # Three different passwords were set, and no empty one: PostgreSQL keeps a salted verifier of
    # each.
    kept = (
        "select count(distinct rolpassword) from pg_authid where rolpassword like 'SCRAM-SHA-256$%'"
    )
    assert _psql(postgres, "-U", "postgres", "-c", kept).stdout.strip() == "3"
    _migrated(postgres, "berth")
    # An installation of 0.1.0, where `berth` owns all, as docs/how-to/containers.md brings it here.
    _psql(postgres, "-U", "postgres", "-c", "create database old owner berth")
    asyncio.run(migrate(f"postgresql+asyncpg://berth@127.0.0.1:{postgres.port}/old"))
    assert not _refused(postgres, "old", "alter table orders enable trigger all")
    _psql(postgres, "-U", "postgres", "-d", "old", "-c", "reassign owned by berth to berth_owner")
    _migrated(postgres, "old")


def test_prepare_makes_tables_keys_and_an_administrators_key_once(
    empty_database: str, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    settings = Settings(
        database_url=empty_database,
        master_key_file=private / "master.key",
        master_public_file=tmp_path / "public" / "master.pub",
        orchestrator_key_dir=private,
        message_key_file=tmp_path / "messages" / "message.key",
        api_secret_file=tmp_path / "api" / "api.key",
        temporal_codec_key_file=str(tmp_path / "messages" / "temporal.key"),
        temporal_api_key_file=str(tmp_path / "messages" / "temporal.jwt"),
        webhook_key_file=str(tmp_path / "webhook" / "webhook.key"),
        jobs_key_file=str(tmp_path / "fleet" / "fleet.key"),
    )
    prepare(settings, tmp_path / "temporal")
    made = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in made} == {
        "master.key",
        "master.pub",
        "signing.key",
        "launch.key",
        "budget.key",
        "message.key",
        "api.key",
        "admin.key",
        "webhook.key",
        "temporal.key",
        "temporal.jwt",
        "admin.jwt",
        "jwks.json",
        "fleet.key",
    }
    assert Path(settings.webhook_key_file).stat().st_mode & 0o777 == 0o600
    prepare(settings, tmp_path / "temporal")
    assert {path: path.read_bytes() for path in made} == made


def test_prepare_gives_each_tier_of_jobs_what_0_1_0_kept_for_all(tmp_path: Path) -> None:
    for name in ("webhook.key", "mail.password", "messaging.token", "push.json"):
        key_file.write_key_file(tmp_path / "jobs" / name, f"old {name}".encode(), private=True)
    key_file.write_key_file(tmp_path / "email" / "mail.password", b"newer", private=True)
    moved = split_provider_secrets(tmp_path)
    assert {path.relative_to(tmp_path).as_posix(): path.read_text() for path in moved} == {
        "webhook/webhook.key": "old webhook.key",
        "messaging/messaging.token": "old messaging.token",
        "push/push.json": "old push.json",
    }
    assert (tmp_path / "email" / "mail.password").read_text() == "newer"
    assert [path for path in (tmp_path / "jobs").iterdir() if not path.name.startswith(".")] == []
    assert split_provider_secrets(tmp_path) == []


def _ask(port: int, *commands: str) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
        link.sendall("".join(f"{command}\r\n" for command in (*commands, "QUIT")).encode())
        return b"".join(iter(lambda: link.recv(65536), b"")).decode()


def test_valkey_starts_with_our_file_and_wants_the_password(
    secret_folder: Path, tmp_path: Path
) -> None:
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
        answer = _ask(
            port, f"AUTH {password}", "CONFIG GET maxmemory-policy", "CONFIG GET appendonly"
        )
        assert "noeviction" in answer
        assert re.search(r"appendonly\r\n\$3\r\nyes", answer)
    finally:
        server.terminate()
        assert server.wait(20) == 0
