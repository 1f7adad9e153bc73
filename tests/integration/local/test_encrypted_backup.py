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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from infra.local.process import HOST, free_port
from infra.local.servers import PostgresServer, ValkeyServer
from infra.recovery.backup import make_backup
from infra.recovery.encryption import make_identity
from infra.recovery.log_follower import CHECK_INTERVAL_S
from infra.recovery.unpack import unpack_backup
from infra.settings import Settings
from infra.valkey.client import connect_valkey, reply_of
from tests.support.systems.local import until
from worker_runtime.protocol import keys

pytestmark = pytest.mark.timeout(120)

#: A file of PostgreSQL's log.
FILE_BYTES = 16 * 1024 * 1024
SPOOL_BYTES = 4 * FILE_BYTES
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

    def __init__(
        self,
        server: PostgresServer,
        folder: Path,
        recipient: str,
        valkey_url: str = "redis://127.0.0.1:1/0",
    ) -> None:
        self._environment = {
            **os.environ,
            "BERTH_DATABASE_URL": server.url(),
            "BERTH_DATA_DIR": str(folder / "data"),
            "BERTH_MASTER_KEY_FILE": str(folder / "master.key"),
            "BERTH_BACKUP_RECIPIENTS": json.dumps([recipient]),
            "BERTH_BACKUP_SPOOL_BYTES": str(SPOOL_BYTES),
            "BERTH_VALKEY_URL": valkey_url,
        }
        self._server, self._folder = server, folder
        self._process = self._start()
        self.wait_receiving()

    def wait_receiving(self) -> None:
        until(lambda: self._receivers() == 1, "receiver of the log")

    def wait_paused(self) -> None:
        until(lambda: self._receivers() == 0, "end of the receiver, too")

    def logged(self) -> str:
        """Return what it wrote to standard error."""
        return self._errors.read_text()

    def spool_bytes(self) -> int:
        files = (self._folder / "data" / "backup-log").glob("*/*")
        return sum(path.stat().st_blocks * 512 for path in files)

    def _receivers(self) -> int:
        return int(ask(self._server, "select count(*) from pg_stat_replication"))

    def _start(self) -> subprocess.Popen[bytes]:
        command = [
            str(Path(sys.executable).with_name("berth")),
            "backup",
            str(self._folder / "b"),
            "--follow",
        ]
        self._errors = self._folder / "follower.log"
        with self._errors.open("ab") as errors:
            return subprocess.Popen(command, env=self._environment, stderr=errors)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *failure: object) -> None:
        self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        """As a machine dies: nothing of the spool is left."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self.wait_paused()
        shutil.rmtree(self._folder / "data")

    def stop(self) -> int:
        self._process.terminate()
        return self._process.wait(20)


def change_settings(server: PostgresServer, **values: str) -> None:
    """Changes settings of PostgreSQL that need no restart."""
    for name, value in values.items():
        ask(server, f"alter system set {name} = '{value}'")
    ask(server, "select pg_reload_conf()")


def write_log(server: PostgresServer, files: int) -> None:
    """Fills as many files of the log, and has the server forget what it needs no more."""
    ask(server, "create table if not exists filler (text text)")
    for _ in range(files):
        ask(server, "insert into filler select repeat('x', 900) from generate_series(1, 1000)")
        ask(server, "select pg_switch_wal()")
    ask(server, "checkpoint")


def close_file(server: PostgresServer) -> str:
    """Return the name of a file of the log that is complete now."""
    ask(server, "create table if not exists filler (text text)")
    ask(server, "insert into filler values ('x')")  # an empty file is not closed
    return str(ask(server, "select pg_walfile_name(pg_switch_wal())"))


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
    base, count, missing = unpack_backup(
        backup, tmp_path / "identity", server.directory / "unpacked"
    )
    assert missing == []
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
    change_settings(server, max_wal_size="32MB", min_wal_size="32MB")
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
    base, *_ = unpack_backup(backup, tmp_path / "identity", tmp_path / "unpacked")
    assert (base / "PG_VERSION").exists()
    assert ask(server, "select count(*) from pg_replication_slots") == 0


def test_while_the_medium_is_away_the_spool_is_bounded_and_what_is_lost_is_said(
    server: PostgresServer, valkey_server: ValkeyServer, tmp_path: Path
) -> None:
    # Nothing is recycled before the spool is full, however slow the receiver is.
    change_settings(server, max_wal_size="32MB", min_wal_size="32MB", wal_keep_size="1GB")
    recipient = make_identity(tmp_path / "identity")
    with Follower(server, tmp_path, recipient, valkey_server.url) as follower:
        before = base_backup(server, tmp_path, recipient)
        (tmp_path / "b").rename(tmp_path / "away")
        for _ in range(12):  # one file in each look of the follower, or less
            if "log_spool_full" in follower.logged():
                break
            write_log(server, 1)
            time.sleep(CHECK_INTERVAL_S)
        follower.wait_paused()
        assert "log_spool_full" in follower.logged()
        # Received since the last look: at most two files, and the one that is being written.
        assert SPOOL_BYTES <= follower.spool_bytes() <= SPOOL_BYTES + 3 * FILE_BYTES
        change_settings(server, wal_keep_size="0")
        write_log(server, 8)
        # PostgreSQL keeps nothing for the follower.
        assert ask(server, "select sum(size) from pg_ls_waldir()") <= 5 * FILE_BYTES
        assert "log_lost" not in follower.logged()

        (tmp_path / "away").rename(tmp_path / "b")
        until(lambda: "log_received_again" in follower.logged(), "the log received again")
        [lost] = [line for line in follower.logged().splitlines() if "log_lost" in line]
        first_lost = json.loads(lost)["first_lost"]
        until(lambda: any(b"log_lost" in text for text in told(valkey_server)), "an alert")

        after = base_backup(server, tmp_path, recipient)
        closed = close_file(server)
        until((tmp_path / "b" / "wal" / f"{closed}.age").exists, "an encrypted file of the log")
        assert follower.stop() == 0
    gaps = unpack_backup(before, tmp_path / "identity", tmp_path / "before").missing
    assert [first for first, _ in gaps] == [first_lost]
    assert unpack_backup(after, tmp_path / "identity", tmp_path / "after").missing == []


def test_what_postgresql_still_has_when_the_medium_is_back_is_received(
    server: PostgresServer, tmp_path: Path
) -> None:
    change_settings(server, wal_keep_size="1GB")
    recipient = make_identity(tmp_path / "identity")
    with Follower(server, tmp_path, recipient) as follower:
        backup = base_backup(server, tmp_path, recipient)
        (tmp_path / "b").rename(tmp_path / "away")
        write_log(server, 8)
        follower.wait_paused()
        write_log(server, 2)
        (tmp_path / "away").rename(tmp_path / "b")
        follower.wait_receiving()
        closed = close_file(server)
        until((tmp_path / "b" / "wal" / f"{closed}.age").exists, "an encrypted file of the log")
        assert follower.stop() == 0
        assert "log_lost" not in follower.logged()
    assert unpack_backup(backup, tmp_path / "identity", tmp_path / "unpacked").missing == []


def test_a_follower_that_begins_while_the_medium_is_away_writes_nothing_in_its_place(
    server: PostgresServer, tmp_path: Path
) -> None:
    change_settings(server, wal_keep_size="1GB")  # nothing is recycled meanwhile
    recipient = make_identity(tmp_path / "identity")
    with Follower(server, tmp_path, recipient) as follower:
        backup = base_backup(server, tmp_path, recipient)
        write_log(server, 1)
        assert follower.stop() == 0
    (tmp_path / "b").rename(tmp_path / "away")
    with Follower(server, tmp_path, recipient) as follower:
        write_log(server, 2)
        until(lambda: "log_not_encrypted" in follower.logged(), "a word on the medium")
        assert not (tmp_path / "b").exists()
        (tmp_path / "away").rename(tmp_path / "b")
        closed = close_file(server)
        until((tmp_path / "b" / "wal" / f"{closed}.age").exists, "an encrypted file of the log")
        assert follower.stop() == 0
    assert unpack_backup(backup, tmp_path / "identity", tmp_path / "unpacked").missing == []


def told(server: ValkeyServer) -> list[bytes]:
    """Return the errors that wait to alert operators."""

    async def read() -> list[bytes]:
        async with connect_valkey(server.url) as client:
            entries = await reply_of(client.xrange(keys.ERRORS))
            return [fields[b"text"] for _, fields in entries]

    return asyncio.run(read())
