"""The exchange as a process: sessions on one port, admin calls on another, one event loop for both."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import time
from pathlib import Path

import structlog
import uvicorn

from infra.exchange.admin import create_admin
from infra.exchange.exchange import Exchange
from infra.exchange.ledger import Ledger
from infra.exchange.limits import Limits
from infra.exchange.link import Link
from infra.exchange.market import Walk

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """What `python -m infra.exchange` takes."""

    host: str
    port: int
    admin_port: int
    ledger: Path
    seed: int = 1
    limits: Limits = field(default_factory=Limits)
    walk: Walk = field(default_factory=Walk)
    day_closes: time | None = None
    day_begins: time = time()


class _AdminServer(uvicorn.Server):
    """Leaves signals alone: uvicorn would raise them again and end the process before it has cleaned up."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(options: ExchangeOptions) -> None:
    """Runs until SIGTERM or SIGINT. Raises `LedgerInUse`, or OSError if a port is taken."""
    ledger = Ledger(options.ledger)
    try:
        # Bound here, because uvicorn ends the process by itself when it cannot bind.
        with socket.create_server((options.host, options.admin_port), backlog=128) as admin_socket:
            await _serve(options, ledger, admin_socket)
    finally:
        ledger.close()


async def _serve(options: ExchangeOptions, ledger: Ledger, admin_socket: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    exchange = Exchange(
        ledger,
        loop.call_later,
        seed=options.seed,
        limits=options.limits,
        walk=options.walk,
        day_closes=options.day_closes,
        day_begins=options.day_begins,
    )
    admin = _AdminServer(
        uvicorn.Config(
            create_admin(exchange),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
    )
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, setattr, admin, "should_exit", True)
    links: set[Link] = set()
    sessions = await loop.create_server(lambda: Link(exchange, links), options.host, options.port)
    _log.info(
        "exchange.started", port=options.port, admin_port=options.admin_port, ledger=str(options.ledger)
    )
    try:
        await admin.serve(sockets=[admin_socket])
    finally:
        sessions.close()
        for link in list(links):
            link.end("the exchange is shutting down", abrupt=False)
        _log.info("exchange.stopped")
