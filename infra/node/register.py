"""The node's register of its workers and their exits, in SQLite: kill -9 of the node loses nothing.

A worker is recorded before it can do anything: as *intended* before its process is started, as
*running* before it gets its config. So a process known only as intended never had a config. The
last exits are kept under growing numbers that are never reused.
"""

import contextlib
import secrets
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import msgspec

from infra.node.protocol import NodeStateUnreadable
from infra.worker_task import Task, TaskExit

SCHEMA_VERSION = 1
#: Exits kept for a subscriber that was away, and ended workers whose token is remembered.
MAX_KEPT_ENDS = 5000

_TABLES = (
    "CREATE TABLE node (log TEXT NOT NULL) STRICT",
    """CREATE TABLE workers (
        task_id TEXT PRIMARY KEY,
        token TEXT NOT NULL UNIQUE,
        worker_id TEXT NOT NULL,
        pool TEXT NOT NULL,
        version TEXT NOT NULL,
        launched_at REAL NOT NULL,
        grace REAL NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('intended', 'running', 'ended')),
        boot_id TEXT NOT NULL DEFAULT '',
        pid INTEGER NOT NULL DEFAULT 0,
        started INTEGER NOT NULL DEFAULT 0,
        cgroup TEXT NOT NULL DEFAULT '',
        stop_reason TEXT
    ) STRICT""",
    "CREATE INDEX workers_by_state ON workers (state)",
    "CREATE TABLE ends (number INTEGER PRIMARY KEY AUTOINCREMENT, exit BLOB NOT NULL) STRICT",
)


@dataclass(frozen=True, kw_only=True)
class NodeEntry:
    """A worker in the register."""

    task_id: str
    token: str
    worker_id: str
    pool: str
    version: str
    #: Unix seconds.
    launched_at: float
    #: Seconds the worker gets to end by itself.
    grace: float
    state: str = "intended"
    boot_id: str = ""
    pid: int = 0
    #: Start time of the process, in clock ticks since boot.
    started: int = 0
    #: Folder of its memory cgroup; empty without limits.
    cgroup: str = ""
    #: Why somebody asked it to stop; None while nobody has.
    stop_reason: str | None = None

    @property
    def task(self) -> Task:
        return Task(**{field.name: getattr(self, field.name) for field in fields(Task)})


class NodeRegister:
    """Every method may raise `sqlite3.Error` when the disk is full.

    There is no fsync: the register must survive a crash of the node, not of the host.
    """

    def __init__(self, path: Path, *, kept: int = MAX_KEPT_ENDS) -> None:
        """Opens or makes the register, which keeps the last `kept` exits. Raises
        `NodeStateUnreadable`."""
        self._kept = kept
        self._decode = msgspec.json.Decoder(TaskExit).decode
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            with contextlib.ExitStack() as failing:
                failing.callback(self._db.close)
                self._db.execute("PRAGMA journal_mode = WAL")
                # A host that loses power loses its workers too;
                # WAL still keeps the file consistent.
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._prepare()
                self.log = str(self._db.execute("SELECT log FROM node").fetchone()[0])
                failing.pop_all()
        except (sqlite3.Error, TypeError) as error:
            raise NodeStateUnreadable(
                f"{path}: {error}; stop the workers by hand, then remove the node's folder"
            ) from None

    def _prepare(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise sqlite3.DatabaseError(f"schema {version}; this release knows {SCHEMA_VERSION}")
        if version == 0:
            with self._transaction():
                for statement in _TABLES:
                    self._db.execute(statement)
                self._db.execute("INSERT INTO node VALUES (?)", (secrets.token_hex(6),))
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def close(self) -> None:
        self._db.close()

    def record_intent(self, entry: NodeEntry) -> None:
        """Records a worker that is about to be started."""
        row = {**asdict(entry), "state": "intended"}
        names, marks = ", ".join(row), ", ".join(f":{name}" for name in row)
        self._db.execute(f"INSERT INTO workers ({names}) VALUES ({marks})", row)  # noqa: S608 - our fields

    def record_running(self, entry: NodeEntry) -> None:
        """Records the process of an intended worker; only then may it get its config."""
        self._db.execute(
            "UPDATE workers SET state = 'running', boot_id = ?, pid = ?, started = ? WHERE "
            "task_id = ?",
            (entry.boot_id, entry.pid, entry.started, entry.task_id),
        )

    def forget_intent(self, task_id: str) -> None:
        """Removes a worker that never ran; its token is free again."""
        self._db.execute("DELETE FROM workers WHERE task_id = ? AND state = 'intended'", (task_id,))

    def record_stopping(self, task_id: str, reason: str) -> None:
        """Notes why a worker is being stopped. The first reason stays."""
        self._db.execute(
            "UPDATE workers SET stop_reason = coalesce(stop_reason, ?) WHERE task_id = ?",
            (reason, task_id),
        )

    def by_token(self, token: str) -> NodeEntry | None:
        return next(iter(self._entries("token = ?", token)), None)

    def in_state(self, state: str) -> list[NodeEntry]:
        return self._entries("state = ? ORDER BY launched_at", state)

    def _entries(self, condition: str, value: str) -> list[NodeEntry]:
        cursor = self._db.execute(f"SELECT * FROM workers WHERE {condition}", (value,))  # noqa: S608
        names = [column[0] for column in cursor.description]
        return [NodeEntry(**dict(zip(names, row, strict=True))) for row in cursor]

    def record_exit(self, end: TaskExit) -> int:
        """Records the exit of a worker; returns the exit's number."""
        with self._transaction():
            written = self._db.execute(
                "INSERT INTO ends (exit) VALUES (?)", (msgspec.json.encode(end),)
            )
            number = written.lastrowid
            self._db.execute("UPDATE workers SET state = 'ended' WHERE task_id = ?", (end.task_id,))
            self._db.execute("DELETE FROM ends WHERE number <= ? - ?", (number, self._kept))
            self._db.execute(
                "DELETE FROM workers WHERE state = 'ended' AND rowid IN (SELECT rowid FROM workers"
                " WHERE state = 'ended' ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                (self._kept,),
            )
        return int(number or 0)

    def exits_after(self, number: int, limit: int = 100) -> list[tuple[int, TaskExit]]:
        query = "SELECT number, exit FROM ends WHERE number > ? ORDER BY number LIMIT ?"
        rows = self._db.execute(query, (number, limit))
        return [(int(number), self._decode(exit_)) for number, exit_ in rows]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
