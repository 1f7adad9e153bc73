"""The FastAPI application: `create_app(settings)`; `uvicorn api.app:app` takes the environment's settings."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from api.attention import router as attention
from api.container import running_services
from api.fleet import router as fleet
from api.http import problems
from api.http.errors import BodyTooLarge
from api.http.middleware import RequestMiddleware
from api.http.streams import on_stop
from api.jobs import router as jobs
from api.orders import router as orders
from api.orders.schemas import PresentOrders
from api.pools import router as pools
from api.positions import router as positions
from api.switches import router as switches
from api.users import router as users
from api.webhooks import router as webhooks
from api.webhooks.schemas import Alert
from api.workers import router as workers
from api.workers.schemas import PresentState
from infra.log import configure_log
from infra.processes import end_with_parent
from infra.settings import Settings

DESCRIPTION = """
Orders go to the broker through a worker of the user's own, which is started when it is needed.

Every error is a problem (RFC 9457, `application/problem+json`) with a stable `code`; `retryable` tells
whether the same call may succeed later. `X-Request-ID` is taken over and returned.
"""


#: The first one that fits a path answers, and most requests are orders.
ROUTERS = (
    orders.placement_router,
    orders.router,
    positions.router,
    positions.trading_router,
    users.router,
    users.credentials_router,
    users.limit_router,
    attention.router,
    switches.router,
    webhooks.router,
    jobs.router,
    jobs.limit_router,
    workers.router,
    fleet.router,
    pools.router,
    pools.rollout_router,
    fleet.metrics_router,
    fleet.health_router,
)


def create_app(settings: Settings) -> FastAPI:
    """The application. Its clients are created when it starts, and closed when it stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running_services(settings) as services:
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
        # FastAPI's own OpenTelemetry. Nothing here exports any, and it costs time in each request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    problems.install(app)
    app.add_middleware(RequestMiddleware)
    for router in ROUTERS:
        # Not through a router of its own for /v1: all routes would be analysed twice, 80 ms of each start.
        app.include_router(router, prefix="/v1")
    _document_more(app)
    return app


def _document_more(app: FastAPI) -> None:
    """Adds to OpenAPI the schemas that no route returns as its model."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document["components"]["schemas"]
        too_large = problems.responses(BodyTooLarge, public=True)[413]
        for path in document["paths"].values():
            for operation in path.values():
                if "requestBody" in operation:
                    operation["responses"].setdefault("413", too_large)
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
    configure_log(settings.log_level)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        # One of several processes of `python -m api`: none is left behind when the parent is killed, not even
        # before this line (getppid would name the process that adopted us).
        end_with_parent(parent.pid)()
    app = create_app(settings)
    gc.collect()
    gc.freeze()  # modules and routes stay for good: no collection has to visit them again
    return app
