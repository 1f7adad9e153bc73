"""Metrics that our processes count by themselves, and the port on which they show them.

The processes of one API share theirs by files (prometheus_client's multiprocess mode), so any of them shows
the sum at `/v1/metrics`. Orchestrator and node have a port each (`BERTH_METRICS_ADDRESS`). A worker has none:
its answers say how long the broker took. No label holds a user, an account or an order.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final, NamedTuple

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.multiprocess import MultiProcessCollector

from worker_runtime.protocol.errors import BerthError, from_code
from worker_runtime.protocol.messages import Answer

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each that nothing reads

#: prometheus_client's own variable: the folder of the files. Read when a process imports the library.
MULTIPROCESS: Final = "PROMETHEUS_MULTIPROC_DIR"
#: Seconds. Orders take 3 ms, a broker 10 to 100; a caller waits for 10 s.
_ORDERS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
#: Seconds, for what is next to nothing on a good day.
_WAITS = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
#: Seconds, for what starts a process or a container.
_STARTS = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class MetricFamily(NamedTuple):
    kind: str
    labels: tuple[str, ...]
    about: str


#: What is counted here, by name.
COUNTED: dict[str, MetricFamily] = {}


def _counter(name: str, about: str, *labels: str) -> Counter:
    COUNTED[name] = MetricFamily("counter", labels, about)
    return Counter(name, about, labels)


def _histogram(name: str, about: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
    COUNTED[name] = MetricFamily("histogram", labels, about)
    return Histogram(name, about, labels, buckets=buckets)


def _gauge(name: str, about: str, *labels: str) -> Gauge:
    COUNTED[name] = MetricFamily("gauge", labels, about)
    return Gauge(name, about, labels)


HTTP_REQUESTS = _counter(
    "berth_http_requests_total", "Requests to the API, by route and status.", "method", "route", "status"
)
HTTP_PROBLEMS = _counter("berth_http_problems_total", "Errors that the API answered, by code.", "code")
LIMITED = _counter(
    "berth_requests_limited_total", "Requests refused with 429: by key, user, address or webhook.", "limit"
)
HTTP_SECONDS = _histogram(
    "berth_http_request_seconds", "Requests to the API, to the end of the answer.", _ORDERS, "route"
)
ORDERS = _counter(
    "berth_orders_answered_total", "Orders that were answered, by state and code.", "state", "code"
)
ORDER_STAGES = _histogram(
    "berth_order_stage_seconds",
    "Stages of an order: `accepted` (until queued), `queued` (until submitted), `submitted` (the broker's).",
    _ORDERS,
    "stage",
)
BROKER_SECONDS = _histogram(
    "berth_broker_call_seconds", "Broker calls of workers, as their answers tell.", _ORDERS, "call"
)
BROKER_ERRORS = _counter(
    "berth_broker_errors_total", "Requests that a worker could not carry out.", "call", "code"
)
LIMIT_USED = _histogram(
    "berth_broker_limit_used_ratio",
    "Share of the fullest of a person's broker limits in use right after an order.",
    (0.1, 0.25, 0.5, 0.75, 0.9, 1),
)
DATABASE_WAIT = _histogram(
    "berth_database_pool_wait_seconds", "Waits for a connection to PostgreSQL.", _WAITS
)
VALKEY_WAIT = _histogram("berth_valkey_pool_wait_seconds", "Waits for a connection to Valkey.", _WAITS)
CLAIM_SECONDS = _histogram(
    "berth_claim_seconds",
    "Claims, from the epoch to the worker: `warm` from the pool, `cold` launched meanwhile.",
    _STARTS,
    *("pool", "kind"),
)
CLAIM_FAILURES = _counter("berth_claims_failed_total", "Claims and logins that failed, by code.", "code")
LAUNCH_SECONDS = _histogram(
    "berth_launch_seconds", "Launches: `launched`, or the code of what failed.", _STARTS, "outcome"
)
MARKS = _gauge("berth_marks", "Marks of workers in service, as the watcher finds them.", "state")
REFUSED = _counter(
    "berth_messages_refused_total", "Messages that are not from whom they name, by kind; dropped.", "kind"
)
EVENTS = _counter("berth_events_total", "Events of workers that were handled.", "group", "kind")

# On the way of each order a look into a dict, 0.1 µs, replaces the library's own, 2 µs.
_http_requests, _http_seconds = cache(HTTP_REQUESTS.labels), cache(HTTP_SECONDS.labels)
_orders, _stage, _broker = cache(ORDERS.labels), cache(ORDER_STAGES.labels), cache(BROKER_SECONDS.labels)


class MetricsUnavailable(BerthError, code="METRICS_UNAVAILABLE"):
    """The port of `BERTH_METRICS_ADDRESS` cannot be opened."""


def count_request(method: str, route: str, status: int, code: str | None, seconds: float) -> None:
    """`route`: its path with the names of its parameters; '' if there is none. `code`: of the problem."""
    if not route or status == 405:  # anybody may make up paths and methods
        method = route = ""
    _http_requests(method, route, status).inc()
    _http_seconds(route).observe(seconds)
    if code:
        HTTP_PROBLEMS.labels(code).inc()


def count_order(answer: Answer, state: str, accepted: float, waited: float) -> None:
    """`accepted`, `waited`: seconds from the request to the queue, and from there to the answer."""
    at_broker = (answer.broker_us or 0) / 1e6
    _stage("accepted").observe(accepted)
    _stage("queued").observe(max(0.0, waited - at_broker))
    if answer.broker_us is not None:
        _stage("submitted").observe(at_broker)
    if answer.limit_used is not None:
        LIMIT_USED.observe(answer.limit_used / 1000)
    _orders(state, _code_of(answer)).inc()
    count_answer("place", answer)


def count_answer(call: str, answer: Answer) -> None:
    """`call`: what was asked of the worker."""
    if answer.broker_us is not None:
        _broker(call).observe(answer.broker_us / 1e6)
    if answer.failure is not None:
        BROKER_ERRORS.labels(call, _code_of(answer)).inc()


def count_claim_failure(code: str) -> None:
    CLAIM_FAILURES.labels(from_code(code).code).inc()


def _code_of(answer: Answer) -> str:
    """A code that this release knows: a worker may make up others."""
    return "" if answer.failure is None else from_code(answer.failure.code).code


def own_registry() -> CollectorRegistry:
    """What this process counted, or all processes of this API together."""
    if MULTIPROCESS not in os.environ:
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry


@contextmanager
def serving_metrics(address: str) -> Iterator[None]:
    """Shows this process's metrics on `host:port`, in a thread; '': nowhere. Raises `MetricsUnavailable`."""
    if not address:
        yield
        return
    host, _, port = address.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host)
    except OSError as error:
        raise MetricsUnavailable(f"{address}: {error.strerror}") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
