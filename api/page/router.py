"""The pages, what tells a page that something changed,
the API's own page, and the login of a browser.

A session is an API key of its own, in a cookie (`http/auth.py`). It ends after `SESSION_TTL`, with
the key that logged in, and when its holder logs out.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal
from urllib.parse import parse_qs
from uuid import UUID

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from api.attention import router as attention
from api.container import InServices
from api.dead_letters import router as dead_letters
from api.fleet import router as fleet
from api.http import problems, proxies
from api.http.auth import COOKIE, cookie_name, session_cookie, source_of
from api.http.errors import Forbidden, Unauthenticated
from api.http.fields import ID_PATTERN, PlainText, UserId
from api.http.notifications import ANY, NotificationListener
from api.http.rights import Role
from api.http.streams import ServerEvent
from api.http.times import QueryEnd, QueryStart
from api.instruments import router as instruments
from api.jobs import router as jobs
from api.jobs.schemas import QueueList
from api.keys import router as keys
from api.keys.schemas import AuditQuery
from api.orders import router as orders
from api.orders.schemas import OrderQuery, OrderStateFilter, PageCursor, Symbol
from api.page.rendering import MAX_TABLE_ROWS, InPage, Page, PagePart, PageRoute, show_template
from api.pools import router as pools
from api.switches import router as switches
from api.symbols import router as symbols
from api.users import router as users
from api.webhook_calls import router as webhook_calls
from api.webhooks import router as webhooks
from api.workers import router as workers
from infra.database import api_keys, audit, quotas
from infra.database.orders.feed import ORDERS_CHANNEL
from infra.database.workers.launches import pools_launched_for
from infra.database.workers.timeline import TIMELINE_CHANNEL
from infra.jobs.view import JobInspector, QueueOverview
from infra.market.calendar import HOME_ZONE
from worker_runtime.protocol.instruments import InstrumentKind
from worker_runtime.protocol.messages import FINAL_ORDER_STATES
from worker_runtime.protocol.requests import SwitchState
from workflows.user_worker.messages import WorkerState

router = APIRouter(route_class=PageRoute, include_in_schema=False)

#: Orders on a user's page.
MAX_SHOWN_ORDERS = 20
#: Changes of state on a user's page.
MAX_SHOWN_CHANGES = 40
#: Days before today with which the form of an export is filled in.
EXPORT_DAYS = 30
Beginning = Annotated[PlainText, Query(max_length=64)]


@router.get("/")
async def show_fleet(
    page: InPage,
    state: Annotated[WorkerState | Literal[""], Query()] = "",
    user: Annotated[str, Query(max_length=64)] = "",
    cursor: fleet.Cursor = None,
) -> HTMLResponse:
    """Shows workers by state, and a filtered table of them; a user's own key sees the user's page
    only."""
    filters = {
        "state": state or None,
        "user_id": user or None,
        "cursor": cursor,
        "limit": MAX_TABLE_ROWS,
    }
    return await page.show(
        "fleet.html",
        summary=page.read(fleet.show_fleet),
        rows=page.read(fleet.list_workers, **filters),
        states=WorkerState,
    )


@router.get("/page/users")
async def show_users(
    page: InPage,
    prefix: Beginning = "",
    disabled: bool | None = None,
    cursor: users.IdPart | None = None,
) -> HTMLResponse:
    """Shows all users, whether or not they ever had a worker."""
    filters = {
        "prefix": prefix or None,
        "disabled": disabled,
        "limit": MAX_TABLE_ROWS,
        "cursor": cursor,
    }
    return await page.show("users.html", users=page.read(users.list_users, **filters))


@router.get("/page/users/{user_id}")
async def show_user(user_id: UserId, page: InPage) -> HTMLResponse:
    """Shows a user's worker, its timeline as a picture, accounts, switches and orders."""
    page.require_user(user_id)
    today = datetime.now(HOME_ZONE).date()
    return await page.show(
        "user.html",
        user_id,
        user_id=user_id,
        export_from=today - timedelta(days=EXPORT_DAYS),
        export_to=today,
        user=page.read(users.get_user, user_id=user_id),
        worker=page.read(workers.get_worker, user_id=user_id),
        timeline=page.read(workers.get_timeline, user_id=user_id, limit=MAX_SHOWN_CHANGES),
        switched=page.read(switches.list_switches, user_id=user_id),
        placed=page.read(
            orders.list_orders, user_id=user_id, query=OrderQuery(limit=MAX_SHOWN_ORDERS)
        ),
        differences=page.read(attention.list_reconciliations, user_id=user_id),
        hooks=page.read(webhooks.list_webhooks, user_id=user_id),
    )


@router.get("/page/users/{user_id}/webhooks/{webhook_id}")
async def show_webhook(
    user_id: UserId,
    webhook_id: UUID,
    page: InPage,
    cursor: Annotated[int | None, Query(ge=1, le=2**63 - 1)] = None,
) -> HTMLResponse:
    """Shows what came to a webhook lately, and what became of it."""
    page.require_user(user_id)
    calls = page.read(
        webhook_calls.list_calls,
        user_id=user_id,
        webhook_id=webhook_id,
        limit=MAX_TABLE_ROWS,
        cursor=cursor,
    )
    return await page.show(
        "webhook.html", f"Webhook {webhook_id}", user_id=user_id, webhook_id=webhook_id, calls=calls
    )


@dataclass(eq=False)
class ChangeFeed:
    """`EventFeed` that says no more than that something has changed:
    a page then loads itself anew."""

    notifications: NotificationListener
    channel: str
    key: str = ANY

    async def current_event(self) -> ServerEvent:
        return ServerEvent(self.notifications.heard[self.channel], "begin", "{}")

    async def events_after(self, last: int) -> Sequence[ServerEvent]:
        heard = self.notifications.heard[self.channel]
        return [ServerEvent(heard, "change", "{}")] if heard != last else []


_CHANNELS = {"workers": TIMELINE_CHANNEL, "orders": ORDERS_CHANNEL}


@router.get("/page/changes")
async def follow_changes(page: InPage, of: Literal["workers", "orders"]) -> Response:
    """Streams a server-sent event when any worker, or any order, has changed."""
    page.require("GET /workers")
    feed = ChangeFeed(page.services.notifications, _CHANNELS[of])
    return await page.open_stream(feed, None)


@router.get("/v1/docs")
async def show_api(services: InServices) -> HTMLResponse:
    """Shows Swagger's page of the API, from files of our own."""
    return show_template("frame/docs.html", root=services.settings.api_root_path)


@router.get("/page/orders")
async def show_orders(
    page: InPage,
    state: Annotated[OrderStateFilter | Literal[""], Query()] = "",
    symbol: Annotated[Symbol | Literal[""], Query()] = "",
    since: Annotated[QueryStart | Literal[""], Query(alias="from")] = "",
    until: Annotated[QueryEnd | Literal[""], Query(alias="to")] = "",
    cursor: PageCursor = None,
) -> HTMLResponse:
    """Shows orders of all users, live: of the last day, or of the days that are chosen."""
    with problems.refusing_invalid("query"):
        query = OrderQuery.model_validate(
            {
                "state": [state] if state else [],
                "symbol": symbol or None,
                "from": since or None,
                "to": until or None,
                "cursor": cursor,
                "limit": MAX_TABLE_ROWS,
            }
        )
    return await page.show(
        "orders.html",
        placed=page.read(orders.list_all_orders, query=query),
        states=OrderStateFilter,
    )


@router.get("/page/orders/{order_id}")
async def show_order(order_id: UUID, page: InPage) -> HTMLResponse:
    """Shows one order with the steps of its life, and how an operator ends it."""
    order = page.read(orders.get_order, order_id=order_id)
    return await page.show(
        "order.html", f"Order {order_id}", order=order, final=sorted(FINAL_ORDER_STATES)
    )


@router.get("/page/attention")
async def show_attention(
    page: InPage, cursor: PageCursor = None, after: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0
) -> HTMLResponse:
    """Shows orders that wait for an operator, accounts whose books differ from the broker's, and
    changed lots."""
    return await page.show(
        "attention.html",
        waiting=page.read(
            attention.list_attention, cursor=cursor, limit=MAX_TABLE_ROWS, unknown=True
        ),
        differences=page.read(
            attention.list_open_reconciliations, after=after, limit=MAX_TABLE_ROWS
        ),
        persons=page.read(attention.list_person_matches, limit=MAX_TABLE_ROWS),
        changes=page.read(instruments.list_changes, limit=MAX_TABLE_ROWS),
        rows=MAX_TABLE_ROWS,
    )


@router.get("/page/switches")
async def show_switches(
    page: InPage,
    state: SwitchState | Literal[""] = "",
    prefix: Beginning = "",
    cursor: switches.Cursor = None,
) -> HTMLResponse:
    """Shows every switch that was ever set, and a form that sets one."""
    filters = {
        "state": state or None,
        "prefix": prefix or None,
        "cursor": cursor,
        "limit": MAX_TABLE_ROWS,
    }
    return await page.show(
        "switches.html", switched=page.read(switches.list_switches, **filters), states=SwitchState
    )


@router.get("/page/symbols")
async def show_symbols(page: InPage) -> HTMLResponse:
    """Shows names that operators gave to symbols, so that signals may use them."""
    return await page.show("symbols.html", named=page.read(symbols.list_symbol_names))


@router.get("/page/instruments")
async def show_instruments(
    page: InPage,
    query: Annotated[PlainText, Query(max_length=120)] = "",
    kind: Annotated[InstrumentKind | Literal[""], Query()] = "",
    cursor: Annotated[PlainText, Query(max_length=64)] = "",
) -> HTMLResponse:
    """Shows who lists each broker's instruments, and a search among them."""
    filters = {"query": query, "kind": kind or None, "after": cursor, "limit": MAX_TABLE_ROWS}
    return await page.show(
        "instruments.html",
        sources=page.read(instruments.list_sources),
        changes=page.read(instruments.list_changes, limit=MAX_TABLE_ROWS),
        listed=page.read(instruments.search_instruments, **filters),
        kinds=InstrumentKind,
    )


@router.get("/page/pools")
async def show_pool(
    page: InPage, name: Annotated[str, Query(pattern=ID_PATTERN, max_length=64)] = ""
) -> HTMLResponse:
    """Shows a pool: what it wants and has, the last hour as a chart, its policy and its rollout."""
    name = name or page.services.settings.pool
    return await page.show(
        "pool.html",
        f"Pool {name}",
        pool_name=name,
        names=page.read_part(page.database.fetch(pools_launched_for)),
        pool=page.read(pools.get_pool, pool=name),
        rollout=page.read(pools.get_rollout, pool=name),
        samples=page.services.pool_history.samples_of(name),
    )


@router.get("/page/servers")
async def show_servers(page: InPage) -> HTMLResponse:
    """Shows the health of every server, the schedules, and the passes of maintenance."""
    return await page.show(
        "servers.html",
        servers=page.read(fleet.list_servers),
        schedules=page.read_part(page.services.fleet.list_schedules()),
        summary=page.read(fleet.show_fleet),
        passes=page.read(fleet.list_passes, odd=True, limit=MAX_TABLE_ROWS),
        primary=page.read(fleet.show_primary),
    )


@router.get("/page/report")
async def show_report(page: InPage, day: fleet.ReportDay = None) -> HTMLResponse:
    """Shows the figures of a trading day, by default of the latest."""
    return await page.show("report.html", report=page.read(fleet.show_report, day=day))


async def _queues_of_applications(page: Page) -> dict[str, PagePart[QueueList]]:
    """Returns the queues of each application, by its name."""
    listed = await page.read(jobs.get_job_applications)
    names = [] if listed.value is None else [row.name for row in listed.value.applications]
    queues = [page.read(jobs.get_job_queues, application=name) for name in names]
    return dict(zip(names, await asyncio.gather(*queues), strict=True))


@router.get("/page/jobs")
async def show_jobs(page: InPage) -> HTMLResponse:
    """Shows the fleet's queues, their runners, the weights of all queues, types of applications,
    and what failed."""

    def look() -> QueueOverview:
        with JobInspector(page.services.settings.valkey_url) as inspector:
            return inspector.overview()

    return await page.show(
        "jobs.html",
        seen=page.read_part(asyncio.to_thread(look)),
        fleet_queues=page.read(jobs.get_job_queues),
        application_queues=_queues_of_applications(page),
        types=page.read(jobs.get_job_types),
        letters=page.read(dead_letters.list_dead_letters, kind="job", limit=MAX_TABLE_ROWS),
    )


@router.get("/page/dead-letters")
async def show_dead_letters(
    page: InPage, kind: dead_letters.Kind = None, cursor: PageCursor = None
) -> HTMLResponse:
    """Shows what failed for good."""
    letters = page.read(
        dead_letters.list_dead_letters, kind=kind, cursor=cursor, limit=MAX_TABLE_ROWS
    )
    return await page.show("dead_letters.html", letters=letters)


@router.get("/page/keys")
async def show_keys(
    page: InPage, revoked: bool = False, cursor: UUID | None = None
) -> HTMLResponse:
    """Shows API keys, which an administrator revokes here."""
    api_keys = page.read(keys.list_api_keys, revoked=revoked, limit=MAX_TABLE_ROWS, cursor=cursor)
    return await page.show("keys.html", keys=api_keys, revoked=revoked)


class AuditPageQuery(AuditQuery):
    """As a form sends it: what is not filled in is an empty text."""

    since: QueryStart | Literal[""] | None = None  # type: ignore[assignment]


@router.get("/page/audit")
async def show_audit(page: InPage, query: Annotated[AuditPageQuery, Query()]) -> HTMLResponse:
    """Shows who did what to whom."""
    given = query.model_copy(update={name: None for name, value in query if value == ""})
    entries = page.read(keys.list_audit_entries, query=given)
    return await page.show("audit.html", entries=entries, query=query)


#: A working day; who works longer logs in anew.
SESSION_TTL = timedelta(hours=12)
#: What browsers say of a request by a page of ours, or by nobody's page.
_OURS = frozenset({"same-origin", "none"})


@router.get("/page/login")
async def show_login(services: InServices) -> Response:
    return show_template("frame/login.html", root=services.settings.api_root_path, problem="")


@router.post("/page/login")
async def log_in(
    request: Request,
    services: InServices,
    sec_fetch_site: Annotated[str, Header()] = "",
    origin: Annotated[str, Header()] = "",
) -> Response:
    """Begins a session with the rights of the API key in the form."""
    # Over plain HTTP browsers send no Sec-Fetch-Site, but the Origin of a form. A proxy may ask us
    # for another host than the browser asked it for.
    hosts = {request.headers.get("host"), request.scope.get(proxies.HOST)}
    same_host = not origin or origin.partition("://")[2] in hosts
    ours = sec_fetch_site in _OURS if sec_fetch_site else same_host
    if not ours:  # nobody is to act under a stranger's key without knowing it
        raise Forbidden("another site's page sent this form")
    root = services.settings.api_root_path
    form = parse_qs((await request.body()).decode("utf-8", "replace"))
    given = form.get("key", [""])[0].strip()
    try:
        caller = await services.authenticator.principal(given)
    except Unauthenticated:
        return show_template(
            "frame/login.html", 401, root=root, problem="This is not a valid API key."
        )
    if caller.session:
        raise Unauthenticated
    caller.require_source(source_of(request))
    token = services.tokens.make()
    async with services.database.session() as session:
        if caller.user_id is not None:
            await quotas.spend_act(session, caller.user_id, ends=False)
        began = await api_keys.begin_session(
            session, token, UUID(caller.key_id), datetime.now(UTC) + SESSION_TTL
        )
        subject = f"key:{caller.key_id}"
        audit.append_entry(session, caller.actor, "page.logged_in", subject, id=str(began.id))
    home = f"/page/users/{caller.user_id}" if caller.role is Role.USER else "/"
    response = RedirectResponse(f"{root}{home}", 303)
    # The browser says it even where a proxy that ends TLS does not, or is not trusted.
    secure = request.url.scheme == "https" or origin.startswith("https://")
    response.set_cookie(
        cookie_name(secure=secure, root_path=root),
        token,
        max_age=SESSION_TTL // timedelta(seconds=1),
        path=root or "/",
        secure=secure,
        httponly=True,
        samesite="strict",
    )
    return response


@router.post("/page/logout")
async def log_out(page: InPage) -> Response:
    """Ends the session in all API processes."""
    if (caller := page.caller).session:
        async with page.database.session() as session:
            with suppress(api_keys.ApiKeyNotFound):  # it ended by itself, and was removed
                await api_keys.revoke_api_key(session, UUID(caller.session))
            subject, ended = f"key:{caller.key_id}", caller.session
            audit.append_entry(session, caller.actor, "page.logged_out", subject, id=ended)
    response = Response(status_code=204)
    name, _ = session_cookie(page.request.headers.get("cookie", ""))
    response.delete_cookie(
        name or COOKIE,
        path=page.link("") or "/",
        secure=name.startswith("__"),  # or browsers do not take it
        httponly=True,
        samesite="strict",
    )
    return response
