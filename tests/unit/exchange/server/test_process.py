"""The exchange as a process survives what clients send it, and a kill -9."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path

import pytest

from infra.exchange.behaviour import Behaviour
from infra.exchange.client import ExchangeAdmin, ExchangeServer, ExchangeUnreachable
from infra.exchange.connection import MAX_LINE_BYTES
from infra.local.process import free_port
from tests.support.brokers.exchange_wire import CANARY, PLACE, ExchangeWire, log_in, register
from worker_runtime.protocol.errors import OrderRejected, UnknownAccount


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xfe\x00\n",
        b"GET / HTTP/1.1\r\n",
        b"{}\n",
        b"[]\n",
        b"null\n",
        b'{"op":"fly","id":7}\n',
        b'{"op":"place","id":"x"}\n',
        b'{"op":"login","id":99999999999999999999999999}\n',
        b"[" * 5000 + b"\n",
        b'{"op":"cancel","id":1,"broker_order_id":"\\ud800"}\n',
    ],
)
def test_garbage_gets_an_error_and_the_connection_lives(
    server: ExchangeServer, garbage: bytes
) -> None:
    with ExchangeWire(server) as wire:
        wire.send(garbage)
        assert wire.receive()["error"] in ("MALFORMED_MESSAGE", "SESSION_DOWN")
        assert wire.ask(op="ping", id=9)["error"] == "SESSION_DOWN"


def test_an_error_carries_the_id_of_its_request(server: ExchangeServer) -> None:
    with ExchangeWire(server) as wire:
        assert wire.ask(op="fly", id=7)["id"] == 7


def test_a_line_without_end_closes_the_connection(server: ExchangeServer) -> None:
    with ExchangeWire(server) as wire:
        with contextlib.suppress(ConnectionError):
            wire.send(b"x" * (4 * MAX_LINE_BYTES))
        with contextlib.suppress(ConnectionError, AssertionError):
            assert wire.receive()["error"] == "MALFORMED_MESSAGE"
        assert wire.closed()


def test_requests_that_come_in_one_packet_are_answered_in_order(server: ExchangeServer) -> None:
    with ExchangeWire(server) as wire:
        wire.send(b'{"op":"ping","id":1}\n{"op":"ping","id":2}\n{"op":"pi')
        assert [wire.receive()["id"], wire.receive()["id"]] == [1, 2]
        wire.send(b'ng","id":3}\n')
        assert wire.receive()["id"] == 3


async def test_strange_orders_are_refused_and_leave_no_trace(server: ExchangeServer) -> None:
    await register(server, "strange")
    with ExchangeWire(server) as wire:
        log_in(wire, "strange")
        for wrong in (
            {"quantity": 0},
            {"quantity": 2**63},
            {"symbol": "\u0000" * 20},
            {"tag": "sevenup"},
            {"price_type": "LMT", "price": "NaN"},
            {"price_type": "LMT", "price": "1E+999999"},
            {"client_note": 7},
        ):
            reply = wire.ask(**{**PLACE, "id": 2, **wrong})
            assert reply["error"] in ("ORDER_REJECTED", "MALFORMED_MESSAGE"), wrong
        assert wire.ask(op="list_orders", id=3)["orders"] == []


async def test_a_second_login_on_a_connection_is_refused(server: ExchangeServer) -> None:
    await register(server, "twice")
    with ExchangeWire(server) as wire:
        log_in(wire, "twice")
        reply = wire.ask(op="login", id=2, account="twice", api_key="key", secret_key=CANARY)
        assert reply["error"] == "MALFORMED_MESSAGE"


async def test_an_order_can_be_cancelled(server: ExchangeServer) -> None:
    await register(server, "cancels")
    async with ExchangeAdmin(server.admin_url) as admin:
        await admin.set_price("9904", Decimal(100))
    with ExchangeWire(server) as wire:
        log_in(wire, "cancels")
        limit = {
            **PLACE,
            "symbol": "9904",
            "price_type": "LMT",
            "price": "90",
            "time_in_force": "ROD",
        }
        placed = wire.ask(**{**limit, "id": 2})["order"]
        replies = [
            wire.ask(op="cancel", id=3, broker_order_id=placed["broker_order_id"]),
            wire.receive(),
        ]
        # Every session of the account gets the change as an event, too.
        assert sorted(reply["kind"] for reply in replies) == ["order_changed", "reply"]
        assert {reply["order"]["state"] for reply in replies} == {"cancelled"}


async def test_the_admin_api_names_its_errors(server: ExchangeServer) -> None:
    async with ExchangeAdmin(server.admin_url) as admin:
        with pytest.raises(UnknownAccount):
            await admin.set_behaviour("nobody", Behaviour())
        with pytest.raises(OrderRejected):
            await admin.fill("P9999999")
        assert (await admin.health()).status == "ok"
    async with ExchangeAdmin(f"http://127.0.0.1:{free_port()}") as nowhere:
        with pytest.raises(ExchangeUnreachable):
            await nowhere.health()


async def test_secret_keys_are_neither_in_the_ledger_nor_in_the_log(server: ExchangeServer) -> None:
    await register(server, "canary")
    with ExchangeWire(server) as wire:
        log_in(wire, "canary")
        wire.ask(op="login", id=2, account="canary", api_key="key", secret_key=CANARY)
    files = [path for path in server.directory.iterdir() if path.is_file()]
    assert {"ledger.db", "exchange.log"} <= {path.name for path in files}
    assert not [path.name for path in files if CANARY.encode() in path.read_bytes()]


async def test_kill_9_keeps_every_order_that_was_acknowledged(tmp_path: Path) -> None:
    with ExchangeServer(tmp_path, options=["--orders-per-10s", "1000000"]) as server:
        await register(server, "a")
        acknowledged: list[str] = []
        enough = threading.Event()

        def trade() -> None:
            with ExchangeWire(server) as wire:
                log_in(wire, "a")
                number = 0
                with contextlib.suppress(OSError, AssertionError):
                    while True:
                        number += 1
                        wire.send(
                            json.dumps(
                                {**PLACE, "id": number, "client_note": f"n{number}"}
                            ).encode()
                        )
                        wire.send(b"\n")
                        while (message := wire.receive())["kind"] != "reply":
                            continue
                        assert message["error"] is None
                        acknowledged.append(f"n{number}")
                        if number == 200:
                            enough.set()

        thread = threading.Thread(target=trade)
        thread.start()
        assert enough.wait(45)  # each order is on the disk before its answer: 6 s, on a good day
        server.kill()
        thread.join(10)
        server.start()
        async with ExchangeAdmin(server.admin_url) as admin:
            kept = await admin.ledger("a")
        notes = [order.client_note for order in kept]
        assert len(acknowledged) >= 200
        assert notes[: len(acknowledged)] == acknowledged  # each once, in order
        assert len(notes) - len(acknowledged) in (0, 1)  # one may have been on its way
        assert all(order.filled == 1 for order in kept)
        server.stop()
        with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_sigterm_ends_it_with_0_and_notifies_its_clients(tmp_path: Path) -> None:
    server = ExchangeServer(tmp_path)
    server.prepare()
    process = subprocess.Popen(list(server.command()), stderr=subprocess.DEVNULL)
    try:
        while not server.answers():
            assert process.poll() is None
        with ExchangeWire(server) as wire:
            wire.ask(op="ping", id=1)
            process.send_signal(signal.SIGTERM)
            assert wire.receive() == {
                "kind": "session_ended",
                "reason": "the exchange is shutting down",
            }
            assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("taken", ["--port", "--admin-port"])
def test_a_taken_port_is_a_clear_error(server: ExchangeServer, tmp_path: Path, taken: str) -> None:
    ports = {"--port": free_port(), "--admin-port": free_port(), taken: server.port}
    words = [str(word) for pair in ports.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-m", "infra.exchange", *words, "--ledger", str(tmp_path / "l.db")],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "PORT_IN_USE" in done.stderr


def test_a_ledger_in_use_is_a_clear_error(server: ExchangeServer) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infra.exchange", "--port", str(free_port()), "--admin-port",
         str(free_port()), "--ledger", str(server.directory / "ledger.db")],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "LEDGER_IN_USE" in done.stderr


def test_an_account_is_opened_from_the_command_line_with_keys_that_log_in(
    server: ExchangeServer,
) -> None:
    def add(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "infra.exchange", "account", "add", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    made = add("opened", "--person", "P7", "--admin-url", server.admin_url)
    assert (made.returncode, made.stderr) == (0, "")
    keys = json.loads(made.stdout)
    assert (keys.pop("broker"), keys["person_id"]) == ("paper", "P7")
    with ExchangeWire(server) as wire:
        assert wire.ask(op="login", id=1, account="opened", **keys)["error"] is None
    url = f"http://127.0.0.1:{free_port()}"
    nobody = add("opened", "--admin-url", url)
    assert nobody.returncode == 1
    assert nobody.stderr == f"error: no paper exchange answers at {url}; is `berth up` running?\n"
    refused = add("x" * 65, "--admin-url", server.admin_url)
    assert (refused.returncode, refused.stderr.startswith("error: ")) == (1, True)
    assert "Traceback" not in refused.stderr


async def test_a_login_that_only_checks_opens_no_session(server: ExchangeServer) -> None:
    await register(server, "checked")
    with ExchangeWire(server) as wire:
        checked = wire.ask(
            op="login", id=1, account="checked", api_key="key", secret_key="x", check_only=True
        )
        assert checked["error"] == "LOGIN_REJECTED"
        assert wire.ask(op="list_orders", id=2)["error"] == "SESSION_DOWN"
        log_in(wire, "checked")
