"""An encrypted backup of a real PostgreSQL, and its log, through a killed follower and a lost
spool."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from infra.local.process import HOST, free_port
from infra.local.servers import PostgresServer
from infra.recovery.backup import make_backup
from infra.recovery.encryption import make_identity
from infra.recovery.unpack import unpack_backup
from infra.settings import Settings
from tests.support.systems.local import until

pytestmark = pytest.mark.timeout(120)

CANARY = "canary-{}-of-an-order"


def ask(server: PostgresServer, question: str, *words: Any) -> Any:
    async def fetch() -> Any:
        link = await asyncpg.connect(
            host=HOST, port=server.port, user=server.user, database="berth"
        )
        try:
            return await link.fetchval(question, *words)
        finally:
            await link.close()

    return asyncio.run(fetch())


@pytest.fixture
def server(server_directory: Path, tmp_path: Path) -> Iterator[PostgresServer]:
    with PostgresServer(server_directory / tmp_path.name, free_port()) as server:
        server.create_database("berth")
        yield server


class Follower:
    """`berth backup --follow` of a server."""

    def __init__(self, server: PostgresServer, folder: Path, recipient: str) -> None:
        self._environment = {
            **os.environ,
            "BERTH_DATABASE_URL": server.url(),
            "BERTH_DATA_DIR": str(folder / "data"),
            "BERTH_MASTER_KEY_FILE": str(folder / "master.key"),
            "BERTH_BACKUP_RECIPIENTS": json.dumps([recipient]),
        }
        self._server, self._folder = server, folder
        self._process = self._start()
        until(lambda: self._receivers() == 1, "receiver of the log")

    def _receivers(self) -> int:
        return int(ask(self._server, "select count(*) from pg_stat_replication"))

    def _start(self) -> subprocess.Popen[bytes]:
        command = [
            str(Path(sys.executable).with_name("berth")),
            "backup",
            str(self._folder / "b"),
            "--follow",
        ]
        return subprocess.Popen(command, env=self._environment)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *failure: object) -> None:
        self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        """As a machine dies: nothing of the spool is left."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        until(lambda: self._receivers() == 0, "end of the receiver, too")
        shutil.rmtree(self._folder / "data")

    def stop(self) -> int:
        self._process.terminate()
        return self._process.wait(20)


def base_backup(server: PostgresServer, folder: Path, recipient: str) -> Path:
    (folder / "master.key").write_text("canary of the master key")
    own = {"database_url": server.url(), "master_key_file": folder / "master.key"}
    own |= {"orchestrator_key_dir": folder / "none", "backup_recipients": (recipient,)}
    return make_backup(Settings.model_validate(own), folder / "b")


def test_an_encrypted_backup_is_restored_with_all_of_its_log(
    server: PostgresServer, tmp_path: Path
) -> None:
    recipient = make_identity(tmp_path / "identity")
    ask(server, "create table orders (text text)")

    def write(number: int) -> None:
        ask(
            server,
            "insert into orders select $1::text from generate_series(1, 100)",
            CANARY.format(number),
        )

    write(1)
    stored = tmp_path / "b" / "wal"
    with Follower(server, tmp_path, recipient) as follower:
        backup = base_backup(server, tmp_path, recipient)
        write(2)
        closed = ask(server, "select pg_walfile_name(pg_switch_wal())")
        until((stored / f"{closed}.age").exists, "an encrypted file of the log")
        follower.kill()  # the spool is lost with it
    write(3)
    ask(server, "select pg_switch_wal()")
    write(4)
    with Follower(server, tmp_path, recipient) as follower:
        write(5)
        received = (
            "select bool_and(flush_lsn >= pg_current_wal_flush_lsn()) from pg_stat_replication"
        )
        until(lambda: ask(server, received), "receipt of all of the log")
        spool = tmp_path / "data" / "backup-log"
        until(
            lambda: len([path for path in spool.glob("*/*") if path.stat().st_blocks]) == 1,
            "a spool that holds only the file that is being written",
        )
        assert follower.stop() == 0
    server.kill()

    files = [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
    assert len(files) >= 5
    for path in files:
        data = path.read_bytes()
        assert data.startswith(b"age-encryption.org/v1"), path
        assert b"canary" not in data
        assert path.stat().st_mode & 0o077 == 0
    base, count = unpack_backup(backup, tmp_path / "identity", server.directory / "unpacked")
    assert count >= 3
    assert (base.parent / "keys" / "master.key").read_text() == "canary of the master key"
    shutil.rmtree(server.data)
    base.rename(server.data)
    wal = server.directory / "unpacked" / "wal"
    with (server.data / "postgresql.auto.conf").open("a") as file:
        file.write(f"restore_command = 'cp {wal}/%f %p || cp {wal}/%f.partial %p'\n")
    (server.data / "recovery.signal").touch()
    server.start()
    until(lambda: not ask(server, "select pg_is_in_recovery()"), "end of the recovery")
    assert ask(server, "select count(*) from orders") == 500
    assert ask(server, "select count(distinct text) from orders") == 5


def test_a_backup_during_which_the_log_moves_on_has_all_that_it_needs(
    server: PostgresServer, tmp_path: Path
) -> None:
    """Its log comes last: without a slot the server would have recycled it meanwhile."""
    for words in ("max_wal_size = '32MB'", "min_wal_size = '32MB'"):
        ask(server, f"alter system set {words}")
    ask(server, "select pg_reload_conf()")
    ask(
        server,
        "create table filler as select repeat('x', 900) as text from generate_series(1, 40000)",
    )
    recipient = make_identity(tmp_path / "identity")
    over = asyncio.Event()

    async def churn() -> None:
        link = await asyncpg.connect(
            host=HOST, port=server.port, user=server.user, database="berth"
        )
        while not over.is_set():
            await link.execute("update filler set text = text where random() < 0.1")
            await link.execute("checkpoint")
        await link.close()

    async def both() -> Path:
        churning = asyncio.create_task(churn())
        made = await asyncio.to_thread(base_backup, server, tmp_path, recipient)
        over.set()
        await churning
        return made

    backup = asyncio.run(both())
    base, _ = unpack_backup(backup, tmp_path / "identity", tmp_path / "unpacked")
    assert (base / "PG_VERSION").exists()
    assert ask(server, "select count(*) from pg_replication_slots") == 0
