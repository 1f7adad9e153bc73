"""uvicorn with our settings, by its documented configuration."""

import signal
import socket
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI

from api.http.middleware import HeadLimitingProtocol
from infra.log import drain_log
from infra.settings import Settings

#: Seconds that requests under way get when the API stops; an order waits for at most 30.
STOP_GRACE_S: Final = 30


def make_server(settings: Settings, app: FastAPI) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        host=settings.api_host,
        port=settings.api_port,
        loop="uvloop",
        http=HeadLimitingProtocol,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # http/proxies.py reads them, by BERTH_TRUSTED_PROXIES
        timeout_keep_alive=settings.api_keep_alive,
        timeout_graceful_shutdown=STOP_GRACE_S,
    )
    return uvicorn.Server(config)


def run_server(server: uvicorn.Server, listening: socket.socket | None = None) -> None:
    """Serves until SIGTERM or SIGINT. uvicorn then finishes its requests and repeats the signal."""
    signal.signal(signal.SIGTERM, _end)
    server.run(sockets=None if listening is None else [listening])


def _end(number: int, frame: FrameType | None) -> None:
    drain_log()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
