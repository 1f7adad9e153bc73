"""PostgreSQL comes back as it was a while ago, with workers alive and clients that repeat what they
sent."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from infra.local.process import HOST
from infra.local.stack import DATABASE, LocalStack
from infra.recovery.encryption import make_identity
from infra.recovery.unpack import unpack_backup
from tests.support.systems.local import VERIFY, RunningSystem, Trader, until

TRADERS = 4
#: Orders of each trader before and after the moment that is restored: 300 in all.
BEFORE, AFTER = 30, 45
#: Of those after it, orders that nobody repeats.
FORGOTTEN = 3
#: Seconds between the moment and the crash. `BERTH_DRILL_GAP=60` is the drill of the runbook.
GAP = float(os.environ.get("BERTH_DRILL_GAP", "4"))


@pytest.fixture
def system(tmp_path: Path) -> Iterator[RunningSystem]:
    with LocalStack(
        tmp_path / "stack", pool_target=TRADERS, connect_timeout=5.0, unknown_blocks="off", **VERIFY
    ) as stack:
        system = RunningSystem(stack)
        yield system
        system.threads.shutdown()


def berth(stack: LocalStack, *words: str, recipients: str = "[]") -> subprocess.Popen[str]:
    command = [
        str(Path(sys.executable).with_name("berth")),
        *words,
        "--data",
        str(stack.folder.path),
    ]
    environment = {**os.environ, "BERTH_BACKUP_RECIPIENTS": recipients}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def ask(stack: LocalStack, question: str) -> Any:
    async def fetch() -> Any:
        link = await asyncpg.connect(
            host=HOST,
            port=stack.postgres.port,
            user=stack.postgres.user,
            password=stack.folder.passwords.postgres,
            database=DATABASE,
        )
        try:
            return await link.fetchval(question)
        finally:
            await link.close()

    return asyncio.run(fetch())


class Backup:
    """A base backup, and the log as it is written, both encrypted."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        folder = stack.folder.path / "backups"
        self._identity = stack.folder.path / "backup.identity"
        #: Beside the server's data, where its programs may read.
        self._unpacked = stack.postgres.directory / "unpacked"
        self.wal = self._unpacked / "wal"
        recipients = json.dumps([make_identity(self._identity)])
        self._follower = berth(stack, "backup", str(folder), "--follow", recipients=recipients)
        try:
            self._made = self._back_up(folder, recipients)
        except BaseException:
            self._follower.kill()
            self._follower.communicate()
            raise
        assert self._made.stat().st_mode & 0o077 == 0

    def _back_up(self, folder: Path, recipients: str) -> Path:
        """Makes a base backup once the follower receives the log; returns its path."""
        stack = self._stack
        until(
            lambda: ask(stack, "select count(*) from pg_stat_replication") == 1,
            "receiver of the log",
        )
        made = berth(stack, "backup", str(folder), recipients=recipients)
        told, errors = made.communicate(timeout=60)
        assert made.returncode == 0, f"{errors}\n{stack.postgres.explain_log()}"
        return Path(told.split()[-1])

    def end(self) -> None:
        self._follower.terminate()
        self._follower.communicate(timeout=10)
        assert self._follower.returncode == 0

    def put_back(self, settings: str, signal: str) -> None:
        """The server's data are the backup's from now on; it starts, recovers and takes writes."""
        base, files, missing = unpack_backup(self._made, self._identity, self._unpacked)
        assert files > 0
        assert missing == []
        keys = {path.name for path in (self._unpacked / "keys").iterdir()}
        assert keys >= {"master.key", "master.pub", "message.key", "api.key"}
        data = self._stack.postgres.data
        shutil.rmtree(data)
        base.rename(data)
        with (data / "postgresql.auto.conf").open("a") as file:
            file.write(settings)
        (data / signal).touch()
        self._stack.postgres.start()


def place(
    system: RunningSystem, traders: list[Trader], numbers: range, pause: float = 0.0
) -> list[str]:
    """Each trader sends its orders one after the other, until an answer fails. Returns the broker's
    ids."""

    def send(trader: Trader) -> list[str]:
        order_ids = []
        for number in numbers:
            try:
                answer = system.order(trader, f"c-{number}")
            except httpx.HTTPError:
                break
            if answer.status_code != 201:
                break
            order_ids.append(answer.json()["broker_order_id"])
            threading.Event().wait(pause)
        return order_ids

    with ThreadPoolExecutor(TRADERS) as threads:
        return [order_id for order_ids in threads.map(send, traders) for order_id in order_ids]


def repeat(system: RunningSystem, trader: Trader, client_order_id: str) -> dict[str, Any]:
    """As a client does: under its id, until the outcome is known."""

    def final() -> dict[str, Any] | None:
        answer = system.order(trader, client_order_id)
        order: dict[str, Any] = answer.json()
        order = order.get("order") or order
        return order if order.get("final") else None

    return until(final, f"outcome of {client_order_id}", 60)


def rest(system: RunningSystem, trader: Trader) -> dict[str, Any]:
    order: dict[str, Any] = system.order(
        trader, price_type="LMT", price="1", time_in_force="ROD"
    ).json()
    assert order["state"] == "submitted"
    return order


def until_cancelled(system: RunningSystem, trader: Trader, order_id: str) -> None:
    def cancelled() -> bool:
        order = system.call("GET", f"/v1/orders/{order_id}", trader.api_key).json()
        return bool(order["state"] == "cancelled")

    until(cancelled, "end of an order that had rested")


def restore_data(stack: LocalStack, backup: Backup, moment: datetime | None) -> None:
    """As the runbook says: to a moment, or by a standby that takes over."""
    if moment is not None:
        backup.end()
        copy = f"cp {backup.wal}/%f %p || cp {backup.wal}/%f.partial %p"
        backup.put_back(
            f"restore_command = '{copy}'\nrecovery_target_time = '{moment.isoformat()}'\n"
            "recovery_target_action = promote\n",
            "recovery.signal",
        )
    else:
        backup.put_back("", "standby.signal")
        assert ask(stack, "select pg_promote()")
    until(lambda: not ask(stack, "select pg_is_in_recovery()"), "end of the recovery")


def restore(stack: LocalStack) -> dict[str, Any]:
    restoring = berth(stack, "restore", "--reason", "drill", "--json")
    told, errors = restoring.communicate(timeout=120)
    assert restoring.returncode == 0, errors
    report: dict[str, Any] = json.loads(told)
    return report


def only_the_broker_knows(system: RunningSystem, traders: list[Trader], known: set[str]) -> None:
    """Waits until all orders but these are on the operators' list."""
    lost = {
        trader.user_id: {order.broker_order_id for order in system.ledger(trader)} - known
        for trader in traders
    }
    assert all(len(orders) >= AFTER * 9 // 10 for orders in lost.values())

    def listed() -> bool:
        rows = system.call("GET", "/v1/reconciliations", system.stack.admin_key).json()[
            "reconciliations"
        ]
        seen = {row["user_id"]: set(row["differences"].get("foreign_orders", ())) for row in rows}
        return all(lost[trader.user_id] <= seen.get(trader.user_id, set()) for trader in traders)

    until(listed, "list of what only the broker knows")


@pytest.mark.drill
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["point in time", "failover"])
def test_300_orders_and_none_is_doubled_or_lost(system: RunningSystem, how: str) -> None:
    stack = system.stack
    traders = [system.trader() for _ in range(TRADERS)]
    list(system.threads.map(system.start_until_active, traders))
    backup = Backup(stack) if how == "point in time" else None
    before = place(system, traders, range(BEFORE))
    assert len(before) == TRADERS * BEFORE
    resting = {trader: rest(system, trader) for trader in traders}
    until(
        lambda: (
            ask(stack, "select count(*) from orders where state = 'filled'") == TRADERS * BEFORE
        ),
        "rows",
    )
    if backup is None:  # a standby that hears of nothing more
        backup = Backup(stack)
        backup.end()
    moment = ask(stack, "select clock_timestamp()")
    threading.Event().wait(0.5)

    newcomer = system.trader()
    for trader, order in resting.items():  # PostgreSQL will believe that they rest
        cancelled = system.call(
            "POST", f"/v1/orders/{order['id']}/cancel", trader.api_key, json={"request_id": "c"}
        )
        assert cancelled.is_success, cancelled.text
    sending = system.threads.submit(
        place, system, traders, range(BEFORE, BEFORE + AFTER), GAP / AFTER
    )
    enough = BEFORE + 1 + AFTER * 9 // 10
    until(
        lambda: min(len(system.ledger(trader)) for trader in traders) >= enough, "orders", GAP + 60
    )
    stack.postgres.kill()  # with orders under way
    for server in (stack.api, *stack.orchestrators):
        server.kill()
    answered = sending.result(60)
    restore_data(stack, backup, moment if how == "point in time" else None)
    assert ask(stack, "select count(*) from orders") == TRADERS * (BEFORE + 1)
    assert len(stack.tasks()) >= TRADERS  # the workers have outlived it

    report = restore(stack)
    assert report["users"] == sorted(trader.user_id for trader in traders)
    assert report["orders"] == TRADERS
    assert stack.tasks() == []
    for server in (*stack.orchestrators, stack.api):
        server.start()
    halted = system.order(traders[0], "c-new")
    assert halted.json()["code"] == "TRADING_HALTED", halted.text
    list(system.threads.map(system.start_until_active, traders))
    only_the_broker_knows(
        system, traders, {*before, *(order["broker_order_id"] for order in resting.values())}
    )
    opened = system.call(
        "PUT",
        "/v1/switches",
        stack.admin_key,
        json={"scope": "all", "state": "open", "reason": "drill"},
    )
    assert opened.is_success, opened.text

    forgotten = range(BEFORE, BEFORE + FORGOTTEN)
    repeated = [number for number in range(BEFORE + AFTER) if number not in forgotten]
    known = {*before}
    asked = [(trader, number) for number in repeated for trader in traders]
    with ThreadPoolExecutor(16) as threads:
        outcomes = list(threads.map(lambda ask: repeat(system, ask[0], f"c-{ask[1]}"), asked))
    for trader in traders:
        ends = [order for (asker, _), order in zip(asked, outcomes, strict=True) if asker is trader]
        filled = [order["broker_order_id"] for order in ends if order["state"] == "filled"]
        theirs = {order.broker_order_id for order in system.ledger(trader)}
        assert len(system.ledger(trader)) == len(theirs)
        # None is lost: an order that was not sent says so, and all others are at the broker, one
        # each.
        assert {order["state"] for order in ends} <= {"filled", "rejected"}
        assert len(filled) == len(set(filled)) >= len(repeated) * 9 // 10
        # None is doubled: the broker has these, the one that rested, and those that nobody repeats.
        rested = resting[trader]["broker_order_id"]
        assert len(theirs - {*filled, rested}) == FORGOTTEN
        assert {*filled, rested} <= theirs
        known |= theirs
        until_cancelled(system, trader, resting[trader]["id"])
        assert system.order(trader, "c-new").json()["state"] == "filled"
    assert {*answered} <= known  # what a client was told is true
    assert newcomer.user_id not in report["users"]
    assert system.call("GET", f"/v1/users/{newcomer.user_id}", stack.admin_key).status_code == 404
    made = system.call("POST", "/v1/users", stack.admin_key, json={"user_id": newcomer.user_id})
    assert made.status_code == 201
    assert ask(stack, f"select epoch from users where id = '{newcomer.user_id}'") > 1_700_000_000  # noqa: S608
