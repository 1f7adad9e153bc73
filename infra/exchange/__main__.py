"""`python -m infra.exchange --port P --admin-port Q --ledger FILE`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from infra.exchange.exchange import CONNECTIONS_PER_PERSON
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
    parser.add_argument("--seed", type=int, default=1, help="seed of the first prices and of random rejects")
    parser.add_argument(
        "--connections-per-person",
        type=int,
        default=CONNECTIONS_PER_PERSON,
        help="logins beyond it are refused",
    )
    return ExchangeOptions(**vars(parser.parse_args()))


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
