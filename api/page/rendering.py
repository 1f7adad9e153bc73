"""Holds what every page of operators needs: what it reads, how it is shown, how it fails.

A page reads by the functions of the REST routes, under their rights. What an operator does there,
the page's script sends to the REST routes themselves. So a page can do nothing that the API does
not do.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar
from urllib.parse import quote

from fastapi import Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from redis.exceptions import RedisError

from api.container import AuthorizedCall, InServices
from api.http.auth import Principal, csrf_token, identify, token_of_request
from api.http.errors import Forbidden, NotFound, Unauthenticated, ValkeyUnavailable
from api.http.fields import plain_price
from api.http.paths import ROOT_PATH
from api.http.problems import problem_response, status_of
from api.http.rights import RIGHTS
from api.page.charts import CHART_WIDTH, pool_lines, timeline_spans
from infra.database.audit import person_of
from infra.database.orders.states import OrderNotFound
from infra.database.reports import report_lines
from infra.database.users import UserNotFound
from infra.market.calendar import HOME_ZONE, HOME_ZONE_NAME
from infra.market.signal_symbols import chart_examples
from infra.valkey.failures import explain_failure
from worker_runtime.protocol.errors import BerthError
from workflows import names

HERE = Path(__file__).parent
#: Nothing but what we serve ourselves: no script or style within a page, no frame around it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
#: Rows of a table.
MAX_TABLE_ROWS = 50
#: Address and name of each page in the menu, and the right without which nobody sees it.
MENU = (
    ("/", "Fleet", "GET /workers"),
    ("/page/users", "Users", "GET /users"),
    ("/page/orders", "Orders", "GET /orders"),
    ("/page/attention", "Needs attention", "GET /attention"),
    ("/page/dead-letters", "Dead letters", "GET /dead-letters"),
    ("/page/switches", "Switches", "GET /workers"),  # a user's own ones stand on the user's page
    ("/page/pools", "Pools", "GET /pools/{pool}"),
    ("/page/jobs", "Jobs", "GET /job-limits"),
    ("/page/symbols", "Symbols", "PUT /symbols/{name}"),
    ("/page/instruments", "Instruments", "GET /instruments/sources"),
    ("/page/servers", "Servers", "GET /fleet"),
    ("/page/report", "Daily report", "GET /reports/daily"),
    ("/page/keys", "API keys", "GET /api-keys"),
    ("/page/audit", "Audit trail", "GET /audit"),
)
_NAMES = {path: name for path, name, _ in MENU}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PagePart(Generic[T]):
    """Holds what a function answered, or why it did not: a page shows the rest of itself
    nevertheless."""

    value: T | None = None
    problem: BerthError | None = None


@dataclass(frozen=True, slots=True)
class Page(AuthorizedCall):
    """A request for a page by somebody who has logged in."""

    request: Request

    def may(self, right: str) -> bool:
        """Return True if the caller's role and scopes have a right of the table; `KeyError` for one
        that is not there."""
        if right not in RIGHTS:
            raise KeyError(right)
        try:
            self.caller.require_right(right)
        except Forbidden:
            return False
        return True

    def require(self, right: str) -> None:
        """Raises `Forbidden` or `ScopeMissing`."""
        self.caller.require_right(right)

    def temporal_link(self, kind: str, name: str) -> str:
        """Returns an address in Temporal's UI; `kind` is `workflows` or `schedules`. '' if no UI is
        known."""
        settings = self.services.settings
        known = f"{settings.temporal_ui_url}/namespaces/{settings.temporal_namespace}/{kind}/"
        return known + quote(name, safe="") if settings.temporal_ui_url else ""

    async def read(self, function: Callable[..., Awaitable[T]], **given: Any) -> PagePart[T]:
        """Returns what a REST route's function answers to the caller.

        Raises what fails the page as a whole: that its subject does not exist, or is not valid.
        """
        try:
            self.caller.require_right(self.request.app.state.right_of[function])
        except Forbidden as refused:
            return PagePart(problem=refused)
        return await self.read_part(function(call=self, **given))

    async def read_part(self, reading: Awaitable[T]) -> PagePart[T]:
        """Returns what was read, or why it cannot be; for what has no REST route. Raises as
        `read`."""
        try:
            return PagePart(await reading)
        except RedisError as error:
            return PagePart(problem=ValkeyUnavailable(explain_failure(error)))
        except BerthError as error:
            if type(error) in (NotFound, OrderNotFound, UserNotFound) or status_of(error) == 422:
                raise
            return PagePart(problem=error)

    async def show(self, template: str, title: str = "", /, **values: Any) -> HTMLResponse:
        """Shows a page of a template with these values; awaits the coroutines among them together.
        Without a title it has its name in the menu."""
        awaited = {name: value for name, value in values.items() if asyncio.iscoroutine(value)}
        values |= zip(awaited, await asyncio.gather(*awaited.values()), strict=True)
        values |= {
            "page": self,
            "root": self.link(""),
            "title": title or _NAMES[self.request.scope["route"].path],
            "filters": defaultdict(str, self.request.query_params),
            "menu": [(path, name) for path, name, right in MENU if self.may(right)],
            "csrf": csrf_token(token_of_request(self.request)),
        }
        return show_template(template, **values)


async def current_page(
    request: Request, services: InServices, caller: Annotated[Principal, Depends(identify)]
) -> Page:
    """Raises `Forbidden` for a page of the menu that the caller has no right to."""
    page = Page(caller, services, request)
    for path, _, right in MENU:
        if path == request.scope["route"].path:
            page.require(right)
    return page


InPage = Annotated[Page, Depends(current_page)]


class PageRoute(APIRoute):
    """A route whose errors are pages, too; a caller who has not logged in is sent there."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                response = await answer(request)
            except Unauthenticated:
                response = RedirectResponse(f"{request.scope[ROOT_PATH]}/page/login", 303)
            except Exception as error:
                # The boundary of a request: what is no problem is raised again.
                failed = problem_response(request.scope, error)
                problem = json.loads(bytes(failed.body))
                response = show_template(
                    "frame/error.html",
                    failed.status_code,
                    root=request.scope[ROOT_PATH],
                    problem=problem,
                )
            response.headers.update(_HEADERS)
            return response

        return handle


def shown_time(at: datetime | None) -> str:
    """Returns a time in the home zone; a dash for none."""
    return "-" if at is None else f"{at.astimezone(HOME_ZONE):%Y-%m-%d %H:%M:%S}"


TEMPLATES = Environment(
    loader=FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals |= {
    "timeline_spans": timeline_spans,
    "pool_lines": pool_lines,
    "width": CHART_WIDTH,
}
TEMPLATES.globals |= {"report_lines": report_lines, "workflow_names": names}
TEMPLATES.globals |= {"home_zone": HOME_ZONE_NAME, "chart_examples": chart_examples}
TEMPLATES.filters |= {"at": shown_time, "person": person_of, "price": plain_price}
TEMPLATES.filters["json"] = partial(json.dumps, default=str, ensure_ascii=False)


def show_template(name: str, status: int = 200, /, *, root: str, **values: Any) -> HTMLResponse:
    """Returns the page of a template; `root` is the root path, in front of every path that the page
    names."""
    return HTMLResponse(TEMPLATES.get_template(name).render(root=root, **values), status)
