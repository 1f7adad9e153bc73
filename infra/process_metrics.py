"""Metrics that our processes count by themselves, in memory, and the port on which they show them.

The processes of one API send copies of their samples to their master (`api/processes/`), so any of
them shows the sum at `/v1/metrics`. Orchestrator and node have a port each
(`BERTH_METRICS_ADDRESS`). A worker has none: its answers say how long the broker took. No label
holds a user, an account or an order.
"""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final, Literal, NamedTuple
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.registry import Collector

from worker_runtime.protocol.errors import from_code
from worker_runtime.protocol.messages import Answer

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each that nothing reads

#: Seconds. Orders take 3 ms, a broker 10 to 100; a caller waits for 10 s.
_ORDER_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
#: Seconds, for what is next to nothing on a good day.
_WAIT_BUCKETS_S = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
#: Seconds, for what starts a process or a container.
_START_BUCKETS_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class MetricFamily(NamedTuple):
    kind: str
    labels: tuple[str, ...]
    about: str
    #: Says how the values of several processes become one. A dead process's gauges are forgotten.
    merge: Literal["sum", "max"] = "sum"


#: The metrics that are counted here, by name.
COUNTED: dict[str, MetricFamily] = {}
_METRICS: dict[str, Counter | Histogram | Gauge] = {}


def _counter(name: str, about: str, *labels: str) -> Counter:
    COUNTED[name] = MetricFamily("counter", labels, about)
    _METRICS[name] = metric = Counter(name, about, labels)
    return metric


def _histogram(name: str, about: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
    COUNTED[name] = MetricFamily("histogram", labels, about)
    _METRICS[name] = metric = Histogram(name, about, labels, buckets=buckets)
    return metric


def _gauge(name: str, about: str, *labels: str, merge: Literal["sum", "max"] = "sum") -> Gauge:
    COUNTED[name] = MetricFamily("gauge", labels, about, merge)
    _METRICS[name] = metric = Gauge(name, about, labels)
    return metric


HTTP_REQUESTS = _counter(
    "berth_http_requests_total",
    "Requests to the API, by route and status.",
    "method",
    "route",
    "status",
)
HTTP_PROBLEMS = _counter(
    "berth_http_problems_total", "Errors that the API answered, by code.", "code"
)
LIMITED = _counter(
    "berth_requests_limited_total",
    "Requests refused with 429: by key, user, address, unproven or webhook.",
    "limit",
)
HTTP_SECONDS = _histogram(
    "berth_http_request_seconds",
    "Requests to the API, to the end of the answer.",
    _ORDER_BUCKETS_S,
    "route",
)
ORDERS = _counter(
    "berth_orders_answered_total", "Orders that were answered, by state and code.", "state", "code"
)
ORDER_STAGES = _histogram(
    "berth_order_stage_seconds",
    "Stages of an order: `accepted` (until queued), `queued` (until submitted), `submitted` "
    "(the broker's).",
    _ORDER_BUCKETS_S,
    "stage",
)
BROKER_SECONDS = _histogram(
    "berth_broker_call_seconds",
    "Broker calls of workers, as their answers tell.",
    _ORDER_BUCKETS_S,
    "call",
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
    "berth_database_pool_wait_seconds", "Waits for a connection to PostgreSQL.", _WAIT_BUCKETS_S
)
VALKEY_WAIT = _histogram(
    "berth_valkey_pool_wait_seconds", "Waits for a connection to Valkey.", _WAIT_BUCKETS_S
)
CLAIM_SECONDS = _histogram(
    "berth_claim_seconds",
    "Claims, from the epoch to the worker: `warm` from the pool, `cold` launched meanwhile.",
    _START_BUCKETS_S,
    "pool",
    "kind",
)
CLAIM_FAILURES = _counter(
    "berth_claims_failed_total", "Claims and logins that failed, by code.", "code"
)
LAUNCH_SECONDS = _histogram(
    "berth_launch_seconds",
    "Launches: `launched`, or the code of what failed.",
    _START_BUCKETS_S,
    "outcome",
)
MARKS = _gauge(
    "berth_marks", "Marks of workers in service, as the watcher finds them.", "state", merge="max"
)
REFUSED = _counter(
    "berth_messages_refused_total",
    "Messages that are not from whom they name, by kind; dropped.",
    "kind",
)
LARGEST_SHARE = _gauge(
    "berth_worker_quota_used_ratio",
    "Share of its quota in Valkey, names or bytes, that the worker with most of it holds.",
    merge="max",
)
CUT_OFF = _counter(
    "berth_workers_cut_off_total",
    "Workers that were cut off because they held or sent too much in Valkey.",
)
EVENTS = _counter("berth_events_total", "Events of workers that were handled.", "group", "kind")

# On the way of each order a look into a dict, 0.1 µs, replaces the library's own, 2 µs.
_http_requests, _http_seconds = cache(HTTP_REQUESTS.labels), cache(HTTP_SECONDS.labels)
_orders, _stage, _broker = (
    cache(ORDERS.labels),
    cache(ORDER_STAGES.labels),
    cache(BROKER_SECONDS.labels),
)


def count_request(method: str, route: str, status: int, code: str | None, seconds: float) -> None:
    """Counts a request. `route` is its path with the names of its parameters, '' if there is none;
    `code` is that of the problem."""
    if not route or status == 405:  # anybody may make up paths and methods
        method = route = ""
    _http_requests(method, route, status).inc()
    _http_seconds(route).observe(seconds)
    if code:
        HTTP_PROBLEMS.labels(code).inc()


def count_order(answer: Answer, state: str, accepted: float, waited: float) -> None:
    """Counts an answered order. `accepted` and `waited` are the seconds from the request to the
    queue, and from there to the answer."""
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
    """Counts an answer of a worker. `call` is what it was asked to do."""
    if answer.broker_us is not None:
        _broker(call).observe(answer.broker_us / 1e6)
    if answer.failure is not None:
        BROKER_ERRORS.labels(call, _code_of(answer)).inc()


def count_claim_failure(code: str) -> None:
    CLAIM_FAILURES.labels(from_code(code).code).inc()


def _code_of(answer: Answer) -> str:
    """Return the answer's code, or one that this release knows: a worker may make up others."""
    return "" if answer.failure is None else from_code(answer.failure.code).code


#: Samples of one or several processes: family, name of the sample, and the values of its labels.
Samples = dict[tuple[str, ...], float]


async def read_samples() -> Samples:
    """Return what this process has counted.
    Other tasks run between two families, which takes 3 ms in all."""
    samples: Samples = {}
    for family, metric in _METRICS.items():
        for collected in metric.collect():
            for sample in collected.samples:
                samples[family, sample.name, *sample.labels.values()] = sample.value
        await asyncio.sleep(0)
    return samples


def merge_samples(total: Samples, added: Samples) -> None:
    """Adds the samples of one more process to `total`,
    without families that this release does not know."""
    for key, value in added.items():
        family = COUNTED.get(key[0])
        if family is None:
            continue
        known = total.get(key)
        if known is None:
            total[key] = value
        else:
            total[key] = max(known, value) if family.merge == "max" else known + value


def without_gauges(samples: Samples) -> Samples:
    """Return what stays true of a process that has ended."""
    lasting = {name for name, family in COUNTED.items() if family.kind != "gauge"}
    return {key: value for key, value in samples.items() if key[0] in lasting}


class SampleCollector(Collector):
    """Shows merged samples to Prometheus."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def collect(self) -> Iterable[Metric]:
        metrics = {
            name: Metric(name.removesuffix("_total"), family.about, family.kind)
            for name, family in COUNTED.items()
        }
        for (name, sample, *values), value in self._samples.items():
            labels = COUNTED[name].labels
            if sample.endswith("_bucket"):
                labels = (*labels, "le")
            if len(labels) == len(values):  # else an older release's process has sent it
                metrics[name].add_sample(sample, dict(zip(labels, values, strict=True)), value)
        return metrics.values()


def registry_of(samples: Samples) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(SampleCollector(samples))
    return registry


#: Seconds between two tries to open the port of metrics.
PORT_RETRY_INTERVAL_S: Final = 5.0


@contextmanager
def serving_metrics(address: str) -> Iterator[None]:
    """Shows this process's metrics on `host:port`, in a thread; '': nowhere.

    A port that cannot be opened is logged and tried again: the process works without metrics.
    """
    if not address:
        yield
        return
    stopping = threading.Event()
    thread = threading.Thread(
        target=_serve_metrics, args=(address, stopping), daemon=True, name="metrics"
    )
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(2 * PORT_RETRY_INTERVAL_S)


def _serve_metrics(address: str, stopping: threading.Event) -> None:
    host, _, port = address.rpartition(":")
    server: WSGIServer | None = None
    logged = ""
    while server is None:
        try:
            server, serving = start_http_server(int(port), host)
        except (OSError, ValueError, OverflowError) as error:
            if logged != str(error):
                logged = str(error)
                structlog.get_logger().error("metrics_unavailable", address=address, reason=logged)
            if stopping.wait(PORT_RETRY_INTERVAL_S):
                return
    stopping.wait()
    server.shutdown()
    server.server_close()
    serving.join()
