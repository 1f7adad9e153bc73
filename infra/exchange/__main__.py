"""The exchange as a process: sessions on one port, admin calls on another, one event loop for both.

`python -m infra.exchange --port P --admin-port Q --ledger FILE`. With `account add NAME` it opens
an account at an exchange that runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import time
from pathlib import Path
from urllib.parse import urlsplit

import structlog
import uvicorn
from pydantic import ValidationError

from infra.environment import forget_library_variables
from infra.exchange.admin import create_admin
from infra.exchange.connection import ExchangeConnection
from infra.exchange.exchange import PaperExchange
from infra.exchange.ledger import ExchangeLedger
from infra.exchange.limits import ExchangeLimits
from infra.exchange.market import PriceWalk
from infra.log import configure_log
from infra.setting_names import log_unread_variables
from infra.settings import Settings, read_settings
from worker_runtime.protocol.errors import BerthError

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """The options of `python -m infra.exchange`."""

    host: str
    port: int
    admin_port: int
    admin_host: str
    ledger: Path
    seed: int = 1
    limits: ExchangeLimits = field(default_factory=ExchangeLimits)
    walk: PriceWalk = field(default_factory=PriceWalk)
    day_closes: time | None = None
    day_begins: time = time()


class _AdminServer(uvicorn.Server):
    """Ignores signals: uvicorn would raise them again
    and end the process before it has cleaned up."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_exchange(options: ExchangeOptions) -> None:
    """Runs until SIGTERM or SIGINT. Raises `LedgerInUse`, or OSError if a port is taken."""
    ledger = ExchangeLedger(options.ledger)
    try:
        # Bound here, because uvicorn ends the process if it cannot bind.
        with socket.create_server(
            (options.admin_host, options.admin_port), backlog=128
        ) as admin_socket:
            await _serve_bound(options, ledger, admin_socket)
    finally:
        ledger.close()


async def _serve_bound(
    options: ExchangeOptions, ledger: ExchangeLedger, admin_socket: socket.socket
) -> None:
    loop = asyncio.get_running_loop()
    exchange = PaperExchange(
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
    connections: set[ExchangeConnection] = set()
    sessions = await loop.create_server(
        lambda: ExchangeConnection(exchange, connections), options.host, options.port
    )
    _log.info(
        "exchange.started",
        port=options.port,
        admin_port=options.admin_port,
        ledger=str(options.ledger),
    )
    try:
        await admin.serve(sockets=[admin_socket])
    finally:
        sessions.close()
        for connection in list(connections):
            connection.end("the exchange is shutting down", abrupt=False)
        _log.info("exchange.stopped")


def add_account(words: list[str]) -> int:
    """Registers an account (`account add NAME`), and prints its credentials as the API takes
    them."""
    # Not for the exchange itself.
    from infra.exchange.client import ExchangeAdmin, ExchangeUnreachable
    from infra.local.stack import known_settings

    url = known_settings("exchange_admin_url").exchange_admin_url
    parser = argparse.ArgumentParser(
        prog="berth exchange account add",
        description="Opens an account at a running paper exchange, or gives it new keys. Prints "
        "its credentials as JSON, which PUT /v1/users/USER/accounts/NAME/credentials takes.",
    )
    parser.add_argument("name", help="id of the account")
    parser.add_argument(
        "--person",
        default="",
        help="whose it is: connections and orders count by person; default: its own",
    )
    parser.add_argument(
        "--admin-url", default=url, help=f"the exchange's admin API; default: {url}"
    )
    given = parser.parse_args(words)
    keys = {"api_key": secrets.token_urlsafe(16), "secret_key": secrets.token_urlsafe(32)}

    async def register() -> None:
        async with ExchangeAdmin(given.admin_url) as exchange:
            await exchange.register(given.name, person_id=given.person, **keys)

    try:
        asyncio.run(register())
    except (BerthError, ValueError) as error:
        nobody = isinstance(error, ExchangeUnreachable)
        why = (
            f"no paper exchange answers at {given.admin_url}; is `berth up` running?"
            if nobody
            else error
        )
        print(f"error: {why}", file=sys.stderr)  # noqa: T201 - a command's output
        return 1
    print(json.dumps({"broker": "paper", **keys, "person_id": given.person}))  # noqa: T201
    return 0


def _options(settings: Settings) -> ExchangeOptions:
    address = urlsplit(f"//{settings.exchange_address}")
    admin = urlsplit(settings.exchange_admin_url)
    parser = argparse.ArgumentParser(prog="berth exchange", description="The paper exchange.")
    parser.add_argument(
        "--host", default=address.hostname or "127.0.0.1", help="private address to listen on"
    )
    parser.add_argument(
        "--port", type=int, default=address.port or 7500, help="port of the broker sessions"
    )
    parser.add_argument(
        "--admin-port", type=int, default=admin.port or 7501, help="port of the admin API"
    )
    parser.add_argument(
        "--admin-host",
        default=admin.hostname or "127.0.0.1",
        help="private address of the admin API",
    )
    parser.add_argument("--ledger", type=Path, default=settings.data_dir / "exchange" / "ledger.db")
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="seed of first prices, of their walk and of random rejects",
    )
    person = parser.add_argument_group("limits of a person", "Beyond them: a ban.")
    person.add_argument("--connections-per-person", type=int, default=settings.exchange_connections)
    person.add_argument("--logins-per-day", type=int, default=settings.exchange_logins_per_day)
    person.add_argument("--orders-per-10s", type=int, default=settings.exchange_orders_per_10s)
    person.add_argument("--queries-per-5s", type=int, default=settings.exchange_queries_per_5s)
    parser.add_argument(
        "--session-life",
        type=float,
        default=ExchangeLimits().session_life_s,
        help="seconds until a token expires",
    )
    parser.add_argument(
        "--walk-ms",
        type=int,
        default=0,
        help="milliseconds between price moves; 0: prices stand still",
    )
    parser.add_argument(
        "--walk-step", type=float, default=PriceWalk().step, help="largest move, as a share"
    )
    parser.add_argument(
        "--day-closes", type=time.fromisoformat, help="HH:MM in Taipei, when resting orders expire"
    )
    parser.add_argument(
        "--day-begins",
        type=time.fromisoformat,
        default=settings.exchange_day_begins,
        help="HH:MM in Taipei, when the lists of orders start empty",
    )
    given = parser.parse_args()
    try:
        limits = ExchangeLimits(
            connections_per_person=given.connections_per_person,
            logins_per_day=given.logins_per_day,
            orders=given.orders_per_10s,
            queries=given.queries_per_5s,
            session_life_s=given.session_life,
        )
        walk = PriceWalk(seed=given.seed, every_ms=given.walk_ms, step=given.walk_step)
    except ValidationError as error:
        parser.error(
            "; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
        )
    return ExchangeOptions(
        host=given.host,
        port=given.port,
        admin_port=given.admin_port,
        admin_host=given.admin_host,
        ledger=given.ledger,
        seed=given.seed,
        limits=limits,
        walk=walk,
        day_closes=given.day_closes,
        day_begins=given.day_begins,
    )


def main() -> int:
    if sys.argv[1:3] == ["account", "add"]:
        return add_account(sys.argv[3:])
    forget_library_variables()
    settings = read_settings(Settings)
    options = _options(settings)
    configure_log(settings.log_level)
    log_unread_variables()
    log = structlog.get_logger()
    try:
        asyncio.run(serve_exchange(options))
    except BerthError as error:
        log.error("exchange.failed", code=error.code, detail=error.detail)
        return 1
    except OSError as error:
        log.error("exchange.failed", code="PORT_IN_USE", detail=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
