"""The FastAPI application: `create_app(settings)`; `uvicorn api.app:app` takes the environment's settings."""

from __future__ import annotations

import multiprocessing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI

from api import log, problems
from api.middleware import RequestFrame
from api.routes import credentials, health, orders, users, workers
from api.services.container import running
from infra.local.servers import end_with_parent
from infra.settings import Settings

DESCRIPTION = """
Orders go to the broker through a worker of the user's own, which is started when it is needed.

Every error is a problem (RFC 9457, `application/problem+json`) with a stable `code`; `retryable` tells
whether the same call may succeed later. `X-Request-ID` is taken over and returned.
"""


def create_app(settings: Settings) -> FastAPI:
    """The application. Its clients are created when it starts, and closed when it stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(settings) as services:
            app.state.services = services
            yield

    app = FastAPI(
        title="Berth",
        version=version("berth"),
        description=DESCRIPTION,
        lifespan=lifespan,
        openapi_url="/v1/openapi.json",
        docs_url="/v1/docs",
        redoc_url=None,
    )
    problems.install(app)
    app.add_middleware(RequestFrame)
    v1 = APIRouter(prefix="/v1")
    for routes in (users, credentials, orders, workers, health):
        v1.include_router(routes.router)
    app.include_router(v1)
    _document_problems(app)
    return app


def _document_problems(app: FastAPI) -> None:
    """Adds the schema of problems to OpenAPI, which no route returns as its model."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document["components"]["schemas"].setdefault("Problem", problems.SCHEMA)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def __getattr__(name: str) -> FastAPI:
    """`app`, made only when a server asks for it: tests import this module without any settings."""
    if name != "app":
        raise AttributeError(name)
    settings = Settings()
    log.configure(settings.log_level)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        # One of several processes of `python -m api`: none is left behind when the parent is killed, not even
        # before this line (getppid would name the process that adopted us).
        end_with_parent(parent.pid)()
    return create_app(settings)
