"""The FastAPI application: `create_app(settings)`; `uvicorn api.app:app` takes the environment's settings."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from api import log, problems
from api.middleware import RequestFrame
from api.routes import (
    attention,
    credentials,
    fleet,
    health,
    intents,
    job_limits,
    jobs,
    limits,
    metrics,
    order_changes,
    order_list,
    orders,
    pools,
    portfolio,
    reconciliations,
    rollouts,
    statements,
    switches,
    timeline,
    users,
    webhooks,
    workers,
)
from api.schemas.order_list import PresentOrders
from api.schemas.timeline import PresentState
from api.schemas.webhooks import Alert
from api.services.container import running
from api.stopping import on_stop
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
            with on_stop(services.streams.end):
                yield

    app = FastAPI(
        title="Berth",
        version=version("berth"),
        description=DESCRIPTION,
        lifespan=lifespan,
        openapi_url="/v1/openapi.json",
        docs_url="/v1/docs",
        redoc_url=None,
        # FastAPI's own OpenTelemetry. Nothing here exports any, and each request was asked who would take it.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    problems.install(app)
    app.add_middleware(RequestFrame)
    for routes in (
        users,
        credentials,
        limits,
        orders,
        order_changes,
        order_list,
        portfolio,
        intents,
        attention,
        reconciliations,
        switches,
        webhooks,
        jobs,
        job_limits,
        statements,
        workers,
        timeline,
        fleet,
        pools,
        rollouts,
        metrics,
        health,
    ):
        # Not through a router of its own for /v1: all routes would be analysed twice, 80 ms of each start.
        app.include_router(routes.router, prefix="/v1")
    _document_more(app)
    return app


def _document_more(app: FastAPI) -> None:
    """Adds to OpenAPI the schemas that no route returns as its model."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document["components"]["schemas"]
        schemas.setdefault("Problem", problems.SCHEMA)
        # The first two are in event streams only; an alert may come as plain text.
        for model in (PresentState, PresentOrders, Alert):
            shape = model.model_json_schema(ref_template="#/components/schemas/{model}")
            shape.pop("$defs", None)  # an order's stand there already
            schemas.setdefault(model.__name__, shape)
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
    app = create_app(settings)
    gc.collect()
    gc.freeze()  # modules and routes stay for good: no collection has to look at them again
    return app
