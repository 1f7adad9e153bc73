"""The durable ledger: accounts, prices, sessions, orders and fills in one SQLite file.

With WAL and synchronous=NORMAL a commit writes to the WAL file without an fsync. A `kill -9` loses
nothing, since the kernel keeps the writes; a crash of the machine may lose the last commits, which
a paper exchange need not survive. A commit takes about 30 µs (1 ms with an fsync), so it may run in
the event loop.

SQLite's exclusive lock refuses a second exchange on the same file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

from infra.exchange.records import (
    Incident,
    IncidentKind,
    LedgerFill,
    LedgerOrder,
    LedgerSession,
    LimitOwnerKind,
)
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import FINAL_ORDER_STATES

_SCHEMA = """
CREATE TABLE IF NOT EXISTS accounts (
    account TEXT PRIMARY KEY, key_hash BLOB NOT NULL, person_id TEXT NOT NULL,
    behaviour TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS prices (symbol TEXT PRIMARY KEY, price TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE, account TEXT NOT NULL,
    person_id TEXT NOT NULL, client TEXT NOT NULL, opened_ms INTEGER NOT NULL,
    closed_ms INTEGER, close_reason TEXT, address TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS sessions_account ON sessions (account);
CREATE INDEX IF NOT EXISTS sessions_open ON sessions (number) WHERE closed_ms IS NULL;
CREATE TABLE IF NOT EXISTS orders (
    number INTEGER PRIMARY KEY, broker_order_id TEXT NOT NULL UNIQUE, account TEXT NOT NULL,
    session_id TEXT NOT NULL, client TEXT NOT NULL, tag TEXT NOT NULL, client_note TEXT NOT NULL,
    symbol TEXT NOT NULL, side TEXT NOT NULL, quantity INTEGER NOT NULL, price_type TEXT NOT NULL,
    price TEXT, time_in_force TEXT NOT NULL, state TEXT NOT NULL, reason TEXT,
    received_ms INTEGER NOT NULL, updated_ms INTEGER NOT NULL,
    lot TEXT NOT NULL DEFAULT 'common', condition TEXT NOT NULL DEFAULT 'cash',
    open_close TEXT NOT NULL DEFAULT 'auto'
) STRICT;
CREATE INDEX IF NOT EXISTS orders_account ON orders (account, number);
CREATE TABLE IF NOT EXISTS fills (
    fill_id TEXT PRIMARY KEY, broker_order_id TEXT NOT NULL, quantity INTEGER NOT NULL,
    price TEXT NOT NULL, at_ms INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS fills_order ON fills (broker_order_id);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS incidents (
    number INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, kind TEXT NOT NULL,
    owner_kind TEXT NOT NULL, owner TEXT NOT NULL, account TEXT NOT NULL, cause TEXT NOT NULL,
    detail TEXT NOT NULL, until_ms INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS incidents_owner ON incidents (owner, at_ms);
CREATE INDEX IF NOT EXISTS sessions_person ON sessions (person_id, opened_ms);
CREATE INDEX IF NOT EXISTS sessions_address ON sessions (address, opened_ms);
"""
_START = "start"

_SESSION_COLUMNS = (
    "session_id, account, person_id, client, opened_ms, closed_ms, close_reason, address"
)
_INCIDENT_COLUMNS = "at_ms, kind, owner_kind, owner, account, cause, detail, until_ms"
_ORDER_COLUMNS = (
    "broker_order_id, account, session_id, client, tag, client_note, symbol, side, quantity, "
    "price_type, price, time_in_force, state, reason, received_ms, updated_ms, lot, condition, "
    "open_close"
)
#: Columns that ledgers of release 0.1.0 lack, with the terms that all orders had.
_ADDED_COLUMNS = {"lot": "common", "condition": "cash", "open_close": "auto"}
_INSERT_ORDER = (
    f"INSERT INTO orders ({_ORDER_COLUMNS}) VALUES "  # noqa: S608
    f"({', '.join('?' * len(_ORDER_COLUMNS.split(',')))})"
)


class LedgerInUse(BerthError, code="LEDGER_IN_USE"):
    """Another running exchange uses the ledger file."""


class LedgerDamaged(BerthError, code="LEDGER_DAMAGED"):
    """The ledger file cannot be read."""


class _LedgerTransaction:
    """Commits at its end, or rolls back after an error."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")


class ExchangeLedger:
    """An open ledger file. Each method commits before it returns, unless it runs inside
    `transaction`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Autocommit: only `transaction` begins transactions.
        self._db = sqlite3.connect(path, isolation_level=None, cached_statements=64, timeout=0.2)
        try:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
            there = {row[1] for row in self._db.execute("PRAGMA table_info(orders)")}
            for name, value in _ADDED_COLUMNS.items():
                if name not in there:
                    self._db.execute(
                        f"ALTER TABLE orders ADD COLUMN {name} TEXT NOT NULL DEFAULT '{value}'"
                    )
        except sqlite3.OperationalError as error:
            self._db.close()
            if "locked" in str(error):
                raise LedgerInUse(str(path)) from None
            raise
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise LedgerDamaged(f"the ledger {path} cannot be read: {error}") from None
        self._next_order = self._count("orders")
        self._next_session = self._count("sessions")
        self._next_fill = int(self._db.execute("SELECT count(*) FROM fills").fetchone()[0])
        #: The number of times that this ledger was opened, this time included.
        self.start = int(self.setting(_START) or 0) + 1
        self.save_setting(_START, str(self.start))

    def _count(self, table: str) -> int:
        return int(self._db.execute(f"SELECT coalesce(max(number), 0) FROM {table}").fetchone()[0])  # noqa: S608

    def close(self) -> None:
        self._db.close()

    def transaction(self) -> _LedgerTransaction:
        """Opens a transaction. Nothing else may run inside it, since all share the connection."""
        return _LedgerTransaction(self._db)

    # --- ids: in order, and never used again after a restart --------------------------------------

    def new_order_id(self) -> str:
        self._next_order += 1
        return f"P{self._next_order:07d}"

    def new_session_id(self) -> str:
        self._next_session += 1
        return f"S{self._next_session:06d}"

    def new_fill_id(self) -> str:
        self._next_fill += 1
        return f"F{self._next_fill:07d}"

    # --- accounts and prices ----------------------------------------------------------------------

    def save_account(self, account: str, key_hash: bytes, person_id: str, behaviour: str) -> None:
        self._db.execute(
            "INSERT INTO accounts VALUES (?, ?, ?, ?) ON CONFLICT (account) DO UPDATE SET"
            " key_hash = excluded.key_hash, person_id = excluded.person_id, behaviour = "
            "excluded.behaviour",
            (account, key_hash, person_id, behaviour),
        )

    def accounts(self) -> list[tuple[str, bytes, str, str]]:
        """Returns rows of account, key hash, person id, behaviour (JSON)."""
        return self._db.execute(
            "SELECT account, key_hash, person_id, behaviour FROM accounts"
        ).fetchall()

    def save_prices(self, prices: Mapping[str, Decimal]) -> None:
        """Saves prices by symbol."""
        with self.transaction():
            self._db.executemany(
                "INSERT INTO prices VALUES (?, ?) ON CONFLICT (symbol) DO UPDATE SET price = "
                "excluded.price",
                [(symbol, str(price)) for symbol, price in prices.items()],
            )

    def prices(self) -> dict[str, Decimal]:
        return {s: Decimal(p) for s, p in self._db.execute("SELECT symbol, price FROM prices")}

    # --- sessions ---------------------------------------------------------------------------------

    def open_session(self, session: LedgerSession) -> None:
        self._db.execute(
            "INSERT INTO sessions (session_id, account, person_id, client, opened_ms, address)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (
                session.session_id,
                session.account,
                session.person_id,
                session.client,
                session.opened_ms,
                session.address,
            ),
        )

    def close_session(self, session_id: str, at_ms: int, reason: str) -> None:
        self._db.execute(
            "UPDATE sessions SET closed_ms = ?, close_reason = ? WHERE session_id = ? AND "
            "closed_ms IS NULL",
            (at_ms, reason, session_id),
        )

    def close_all_sessions(self, at_ms: int, reason: str) -> None:
        """Closes the sessions that a killed exchange left open."""
        self._db.execute(
            "UPDATE sessions SET closed_ms = ?, close_reason = ? WHERE closed_ms IS NULL",
            (at_ms, reason),
        )

    def sessions(
        self, account: str | None = None, only_open: bool | None = None
    ) -> list[LedgerSession]:
        query = (
            f"SELECT {_SESSION_COLUMNS} FROM sessions"  # noqa: S608
            " WHERE (:account IS NULL OR account = :account)"
            " AND (:open IS NULL OR (closed_ms IS NULL) = :open) ORDER BY number"
        )
        rows = self._db.execute(query, {"account": account, "open": only_open})
        names = _SESSION_COLUMNS.split(", ")
        return [LedgerSession.model_validate(dict(zip(names, row, strict=True))) for row in rows]

    def count_sessions(self, owner_kind: LimitOwnerKind, owner: str, since_ms: int) -> int:
        """Counts the logins of a person or from an address since then."""
        column = "person_id" if owner_kind is LimitOwnerKind.PERSON else "address"
        query = f"SELECT count(*) FROM sessions WHERE {column} = ? AND opened_ms >= ?"  # noqa: S608
        return int(self._db.execute(query, (owner, since_ms)).fetchone()[0])

    # --- incidents and settings -------------------------------------------------------------------

    def add_incident(self, incident: Incident) -> None:
        self._db.execute(
            f"INSERT INTO incidents ({_INCIDENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
            (
                incident.at_ms,
                incident.kind.value,
                incident.owner_kind.value,
                incident.owner,
                incident.account,
                incident.cause,
                incident.detail,
                incident.until_ms,
            ),
        )

    def incidents(
        self, *, kind: IncidentKind | None = None, owner: str | None = None, since_ms: int = 0
    ) -> list[Incident]:
        """Returns incidents, oldest first."""
        rows = self._db.execute(
            f"SELECT {_INCIDENT_COLUMNS} FROM incidents WHERE (:kind IS NULL OR kind = :kind)"  # noqa: S608
            " AND (:owner IS NULL OR owner = :owner) AND at_ms >= :since ORDER BY number",
            {"kind": kind, "owner": owner, "since": since_ms},
        )
        names = _INCIDENT_COLUMNS.split(", ")
        return [Incident.model_validate(dict(zip(names, row, strict=True))) for row in rows]

    def setting(self, name: str) -> str | None:
        """Returns a setting of the whole exchange (JSON)."""
        return self.settings_like(name).get("")

    def settings_like(self, prefix: str) -> dict[str, str]:
        """Returns settings whose names begin with `prefix`, by the rest of the name."""
        rows = self._db.execute(
            "SELECT name, value FROM settings WHERE substr(name, 1, ?) = ?", (len(prefix), prefix)
        )
        return {name[len(prefix) :]: value for name, value in rows}

    def save_setting(self, name: str, value: str) -> None:
        self._db.execute(
            "INSERT INTO settings VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = "
            "excluded.value",
            (name, value),
        )

    # --- orders -----------------------------------------------------------------------------------

    def insert_order(self, order: LedgerOrder) -> None:
        self._db.execute(
            _INSERT_ORDER,
            (
                order.broker_order_id,
                order.account,
                order.session_id,
                order.client,
                order.tag,
                order.client_note,
                order.symbol,
                order.side.value,
                order.quantity,
                order.price_type.value,
                None if order.price is None else str(order.price),
                order.time_in_force.value,
                order.state.value,
                order.reason,
                order.received_ms,
                order.updated_ms,
                order.lot.value,
                order.condition.value,
                order.open_close.value,
            ),
        )
        self.insert_fills(order.broker_order_id, order.fills)

    def update_order(self, order: LedgerOrder, new_fills: tuple[LedgerFill, ...]) -> None:
        self._db.execute(
            "UPDATE orders SET state = ?, reason = ?, updated_ms = ?, quantity = ?, price = ?"
            " WHERE broker_order_id = ?",
            (
                order.state.value,
                order.reason,
                order.updated_ms,
                order.quantity,
                None if order.price is None else str(order.price),
                order.broker_order_id,
            ),
        )
        self.insert_fills(order.broker_order_id, new_fills)

    def insert_fills(self, broker_order_id: str, fills: tuple[LedgerFill, ...]) -> None:
        for fill in fills:
            self._db.execute(
                "INSERT INTO fills VALUES (?, ?, ?, ?, ?)",
                (fill.fill_id, broker_order_id, fill.quantity, str(fill.price), fill.at_ms),
            )

    def orders(
        self, account: str | None = None, *, since_ms: int = 0, after: str = ""
    ) -> list[LedgerOrder]:
        """Returns orders with their fills, oldest first, after the broker order id `after`."""
        where = (
            "(:account IS NULL OR account = :account) AND received_ms >= :since AND "
            "broker_order_id > :after"
        )
        return self._read_orders(where, {"account": account, "since": since_ms, "after": after})

    def resting_orders(self) -> list[LedgerOrder]:
        final = ", ".join(f"'{state.value}'" for state in sorted(FINAL_ORDER_STATES))
        return self._read_orders(f"state NOT IN ({final})", {})

    def order(self, broker_order_id: str) -> LedgerOrder | None:
        orders = self._read_orders("broker_order_id = :id", {"id": broker_order_id})
        return orders[0] if orders else None

    def count_orders(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM orders").fetchone()[0])

    def _read_orders(self, where: str, values: dict[str, object]) -> list[LedgerOrder]:
        fills: dict[str, list[LedgerFill]] = {}
        chosen = f"SELECT broker_order_id FROM orders WHERE {where}"  # noqa: S608 - `where` is ours
        columns = "broker_order_id, fill_id, quantity, price, at_ms"
        query = (
            f"SELECT {columns} FROM fills WHERE broker_order_id IN ({chosen}) ORDER BY fills.rowid"  # noqa: S608
        )
        for order_id, fill_id, quantity, price, at_ms in self._db.execute(query, values):
            fill = LedgerFill(fill_id=fill_id, quantity=quantity, price=Decimal(price), at_ms=at_ms)
            fills.setdefault(order_id, []).append(fill)
        rows = self._db.execute(
            f"SELECT {_ORDER_COLUMNS} FROM orders WHERE {where} ORDER BY number",  # noqa: S608
            values,
        )
        return [_order(row, tuple(fills.get(row[0], ()))) for row in rows]


def _order(row: tuple[object, ...], fills: tuple[LedgerFill, ...]) -> LedgerOrder:
    columns = dict(zip(_ORDER_COLUMNS.split(", "), row, strict=True))
    return LedgerOrder.model_validate({**columns, "fills": fills})
