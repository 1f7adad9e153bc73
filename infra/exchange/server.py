"""The exchange as a process: sessions on one port, admin calls on another, one event loop for both."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvicorn

from infra.exchange.admin import create_admin
from infra.exchange.exchange import CONNECTIONS_PER_PERSON, Exchange
from infra.exchange.ledger import Ledger
from infra.exchange.link import Link

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """What `python -m infra.exchange` takes."""

    host: str
    port: int
    admin_port: int
    ledger: Path
    seed: int = 1
    connections_per_person: int = CONNECTIONS_PER_PERSON


class _AdminServer(uvicorn.Server):
    """Leaves signals alone: uvicorn would raise them again and end the process before it has cleaned up."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(options: ExchangeOptions) -> None:
    """Runs until SIGTERM or SIGINT. Raises `LedgerInUse`, or OSError if a port is taken."""
    loop = asyncio.get_running_loop()
    ledger = Ledger(options.ledger)
    links: set[Link] = set()
    try:
        exchange = Exchange(
            ledger,
            loop.call_later,
            seed=options.seed,
            connections_per_person=options.connections_per_person,
        )
        admin = _AdminServer(
            uvicorn.Config(
                create_admin(exchange),
                host=options.host,
                port=options.admin_port,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=2,
            )
        )
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, setattr, admin, "should_exit", True)
        sessions = await loop.create_server(lambda: Link(exchange, links), options.host, options.port)
        _log.info(
            "exchange.started", port=options.port, admin_port=options.admin_port, ledger=str(options.ledger)
        )
        try:
            await admin.serve()
        finally:
            sessions.close()
            for link in list(links):
                link.end("the exchange is shutting down", abrupt=False)
            _log.info("exchange.stopped")
    finally:
        ledger.close()
