"""`python -m infra.exchange --port P --admin-port Q --ledger FILE`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from datetime import time
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from pydantic import ValidationError

from infra.exchange.limits import Limits
from infra.exchange.market import Walk
from infra.exchange.server import ExchangeOptions, serve
from infra.settings import Settings
from worker_runtime.protocol.errors import BerthError


def _options(settings: Settings) -> ExchangeOptions:
    address = urlsplit(f"//{settings.exchange_address}")
    admin = urlsplit(settings.exchange_admin_url)
    parser = argparse.ArgumentParser(prog="berth exchange", description="The paper exchange.")
    parser.add_argument(
        "--host", default=address.hostname or "127.0.0.1", help="private address to listen on"
    )
    parser.add_argument("--port", type=int, default=address.port or 7500, help="port of the broker sessions")
    parser.add_argument("--admin-port", type=int, default=admin.port or 7501, help="port of the admin API")
    parser.add_argument("--ledger", type=Path, default=settings.data_dir / "exchange" / "ledger.db")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of first prices, of their walk and of random rejects"
    )
    person = parser.add_argument_group("limits of a person", "Beyond them: a ban.")
    person.add_argument("--connections-per-person", type=int, default=settings.exchange_connections)
    person.add_argument("--logins-per-day", type=int, default=settings.exchange_logins_per_day)
    person.add_argument("--orders-per-10s", type=int, default=settings.exchange_orders_per_10s)
    person.add_argument("--queries-per-5s", type=int, default=settings.exchange_queries_per_5s)
    parser.add_argument(
        "--session-life", type=float, default=Limits().session_life_s, help="seconds until a token expires"
    )
    parser.add_argument(
        "--walk-ms", type=int, default=0, help="prices move by themselves this often; 0: they stand still"
    )
    parser.add_argument("--walk-step", type=float, default=Walk().step, help="largest move, as a share")
    parser.add_argument(
        "--day-closes", type=time.fromisoformat, help="HH:MM in Taipei, when orders that rest expire"
    )
    parser.add_argument(
        "--day-begins",
        type=time.fromisoformat,
        default=settings.exchange_day_begins,
        help="HH:MM in Taipei, when the lists of orders begin anew",
    )
    given = parser.parse_args()
    try:
        limits = Limits(
            connections_per_person=given.connections_per_person,
            logins_per_day=given.logins_per_day,
            orders=given.orders_per_10s,
            queries=given.queries_per_5s,
            session_life_s=given.session_life,
        )
        walk = Walk(seed=given.seed, every_ms=given.walk_ms, step=given.walk_step)
    except ValidationError as error:
        parser.error("; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors()))
    return ExchangeOptions(
        host=given.host,
        port=given.port,
        admin_port=given.admin_port,
        ledger=given.ledger,
        seed=given.seed,
        limits=limits,
        walk=walk,
        day_closes=given.day_closes,
        day_begins=given.day_begins,
    )


def main() -> int:
    settings = Settings()
    options = _options(settings)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[settings.log_level]
        ),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    log = structlog.get_logger()
    try:
        asyncio.run(serve(options))
    except BerthError as error:
        log.error("exchange.failed", code=error.code, detail=error.detail)
        return 1
    except OSError as error:
        log.error("exchange.failed", code="PORT_IN_USE", detail=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
