"""A raw client of an exchange that runs as a process."""

from __future__ import annotations

import json
import socket
from typing import Any

from infra.exchange.client import ExchangeAdmin, ExchangeServer

CANARY = "canary-secret-key"
PLACE = {
    "op": "place",
    "symbol": "2330",
    "side": "buy",
    "quantity": 1,
    "price_type": "MKT",
    "price": None,
    "time_in_force": "IOC",
    "tag": "t",
}


class ExchangeWire:
    """A raw client: it sends what it likes."""

    def __init__(self, server: ExchangeServer, source: str = "127.0.0.1") -> None:
        self._link = socket.create_connection(
            ("127.0.0.1", server.port), timeout=10, source_address=(source, 0)
        )
        self._lines = self._link.makefile("rb")

    def __enter__(self) -> ExchangeWire:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._link.close()

    def send(self, data: bytes) -> None:
        self._link.sendall(data)

    def receive(self) -> dict[str, Any]:
        line = self._lines.readline()
        assert line, "the exchange closed the connection"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def closed(self) -> bool:
        try:
            return self._lines.readline() == b""
        except ConnectionResetError:  # closed while bytes of ours were unread
            return True

    def send_one(self, **request: object) -> None:
        self.send(json.dumps(request).encode() + b"\n")

    def ask(self, **request: object) -> dict[str, Any]:
        """Whatever comes next: the answer, or an event."""
        self.send_one(**request)
        return self.receive()

    def ask_reply(self, **request: object) -> dict[str, Any]:
        """The answer; events before it are dropped."""
        self.send_one(**request)
        while (message := self.receive())["kind"] != "reply" or message["id"] != request["id"]:
            continue
        return message

    def last(self) -> dict[str, Any]:
        """The last message before the exchange closed the connection."""
        message: dict[str, Any] = {}
        while line := self._lines.readline():
            message = json.loads(line)
        return message


async def register(server: ExchangeServer, account: str) -> None:
    async with ExchangeAdmin(server.admin_url) as admin:
        await admin.register(account, "key", CANARY)


def log_in(wire: ExchangeWire, account: str) -> None:
    reply = wire.ask(op="login", id=1, account=account, api_key="key", secret_key=CANARY)
    assert reply["session_id"], reply
