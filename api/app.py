"""The FastAPI application: `create_app(settings)`;
`uvicorn api.app:app` takes the environment's settings."""

import gc
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version
from operator import attrgetter
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles

from api.attention import router as attention
from api.container import running_services
from api.dead_letters import router as dead_letters
from api.fleet import router as fleet
from api.http import problems
from api.http.middleware import RequestMiddleware
from api.http.paths import local_path, redacted_path
from api.http.proxies import TrustedProxies
from api.http.streams import on_stop
from api.instruments import router as instruments
from api.jobs import router as jobs
from api.keys import router as keys
from api.orders import router as orders
from api.orders.schemas import PresentOrders
from api.page import router as pages
from api.page.rendering import HERE
from api.pools import router as pools
from api.positions import router as positions
from api.processes.link import OwnCounts, ProcessCounts
from api.switches import router as switches
from api.symbols import router as symbols
from api.users import router as users
from api.webhook_calls import router as webhook_calls
from api.webhooks import router as webhooks
from api.webhooks.schemas import Signal
from api.workers import router as workers
from api.workers.schemas import PresentState
from infra.log import configure_log
from infra.setting_names import log_unread_variables
from infra.settings import Settings
from infra.tracing import Traces, closing_traces
from worker_runtime.protocol.errors import BerthError

DESCRIPTION = """
Orders go to the broker through a worker of the user's own, which is started when it is needed.

Every error is a problem (RFC 9457, `application/problem+json`) with a stable `code`; `retryable`
tells whether the same call may succeed later. `X-Request-ID` is taken over and returned.
"""


#: The first one that fits a path answers, and most requests are orders.
ROUTERS = (
    orders.router,
    positions.router,
    positions.trading_router,
    users.router,
    users.credentials_router,
    users.limit_router,
    keys.router,
    keys.image_router,
    keys.audit_router,
    attention.router,
    switches.router,
    webhooks.router,
    webhook_calls.router,
    symbols.router,
    instruments.router,
    jobs.router,
    workers.router,
    fleet.router,
    dead_letters.router,
    pools.router,
    fleet.metrics_router,
    fleet.health_router,
)


#: Made once, also for several applications in one process: FastAPI analyses its routes for 0.2 s.
_served = APIRouter()
for _router in ROUTERS:
    _served.include_router(_router, prefix="/v1")
_served.include_router(pages.router)


def create_app(settings: Settings, counts: ProcessCounts | None = None) -> FastAPI:
    """Creates the application. Its clients are created when it starts, and closed when it stops.

    `counts`: what its processes count together; None: this is the only one.
    """
    counted = counts or OwnCounts()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with closing_traces(traces), counted.running(), AsyncExitStack() as stack:
            try:
                services = await stack.enter_async_context(
                    running_services(settings, counted, traces)
                )
            except (BerthError, OSError) as error:
                # A file of the settings; uvicorn shows the traceback, too.
                structlog.get_logger().error("start_failed", reason=str(error))
                raise
            app.state.services = services
            counted.begin_to_serve()
            with on_stop(services.streams.end):
                yield

    traces = Traces(settings.traces_url, "berth-api") if settings.traces_url else None
    app = FastAPI(
        routes=_served.routes,
        title="Berth",
        version=version("berth"),
        description=DESCRIPTION,
        lifespan=lifespan,
        openapi_url="/v1/openapi.json",
        docs_url=None,  # a page of ours: FastAPI's gets its script from a CDN
        redoc_url=None,
        # A redirect would repeat a webhook's token; paths.py takes the slash away.
        redirect_slashes=False,
        # FastAPI's own OpenTelemetry costs time in each request:
        # off unless somebody collects traces.
        telemetry={
            "tracing": traces is not None,
            "tracer_provider": traces.provider if traces else None,
            "exclude": partial(_is_untraced, settings.api_root_path),
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
    )
    problems.install(app)
    app.add_middleware(
        RequestMiddleware,
        proxies=TrustedProxies(settings.trusted_proxies, settings.forwarded_header),
        root_path=settings.api_root_path,
        limits=partial(attrgetter("state.services.limits"), app),
    )
    app.state.right_of = {
        route.endpoint: f"{method} {route.path}"
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }
    app.mount("/page/static", StaticFiles(directory=HERE / "static"))
    app.mount("/page/swagger", StaticFiles(packages=[("fastapi_offline", "static")]))
    _document_more(app, settings.api_root_path)
    return app


def _is_untraced(root_path: str, scope: MutableMapping[str, Any]) -> bool:
    """Return True if no span shows a request:
    a webhook's path is a secret, and probes come all the time."""
    path = local_path(scope.get("path", ""), root_path)
    return redacted_path(path) != path or path.startswith(
        ("/v1/healthz", "/v1/readyz", "/v1/metrics")
    )


def _document_more(app: FastAPI, root_path: str) -> None:
    """Adds to OpenAPI the schemas that no route returns as its model,
    and the root path as the server."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document["components"]["schemas"]
        if root_path:
            document["servers"] = [{"url": root_path}]
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                problems.add_common(operation, method, path.removeprefix("/v1"))
                # In the order of the path; a user that a dependency reads would come last.
                operation.get("parameters", []).sort(
                    key=lambda parameter: (
                        parameter["in"] != "path",
                        path.find(f"{{{parameter['name']}}}"),
                    )
                )
        # FastAPI's own, which no answer has.
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas.setdefault("Problem", problems.SCHEMA)
        # The first two are in event streams only; a signal may come as plain text.
        for model in (PresentState, PresentOrders, Signal):
            shape = model.model_json_schema(ref_template="#/components/schemas/{model}")
            shape.pop("$defs", None)  # an order's stand there already
            schemas.setdefault(model.__name__, shape)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def load_app(settings: Settings, counts: ProcessCounts | None = None) -> FastAPI:
    """Creates the application of a process that does nothing else."""
    app = create_app(settings, counts)
    gc.collect()
    gc.freeze()  # modules and routes stay for good: no collection has to visit them again
    return app


def __getattr__(name: str) -> FastAPI:
    """Makes `app`, only when a server asks for it: tests import this module without any
    settings."""
    if name != "app":
        raise AttributeError(name)
    settings = Settings()
    configure_log(settings.log_level)
    log_unread_variables()
    return load_app(settings)
