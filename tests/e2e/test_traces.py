"""Traces of the running system, as a collector receives them: of an order, to its fill, and of a
claim."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from infra.local.stack import LocalStack
from tests.support.systems.local import PATIENCE, POOL, RunningSystem, Trader, run_system, until

pytestmark = pytest.mark.drill
REQUEST = "POST /v1/users/{user_id}/orders"
#: What each order and each claim has, whatever else happens.
ORDER = {"order accepted", "order queued", "broker place", "order submitting", "order filled"}
CLAIM = {
    "StartUpdateWithStartWorkflow:UserWorkerWorkflow",
    "RunWorkflow:UserWorkerWorkflow",
    "HandleUpdate:ensure_active",
    "StartActivity:claim_worker",
    "RunActivity:claim_worker",
    "worker login",
}


class Collector:
    """A collector of traces that keeps them in memory."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        #: Cleared while no sender gets an answer.
        self.answering = threading.Event()
        self.answering.set()
        spans, answering = self.spans, self.answering

        class SpanReceiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                answering.wait()
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), SpanReceiver)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            self.answering.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def trace(self, trace_id: str) -> dict[str, Span]:
        """The spans of one trace by their names."""
        return {span.name: span for span in list(self.spans) if span.trace_id.hex() == trace_id}

    def await_names(self, trace_id: str, names: set[str]) -> dict[str, Span]:
        until(lambda: names <= set(self.trace(trace_id)), f"{names} in a trace", patience=15.0)
        return self.trace(trace_id)


def attributes(span: Span) -> dict[str, str]:
    return {attribute.key: attribute.value.string_value for attribute in span.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    running_collector = Collector()
    with running_collector.running():
        yield running_collector


@pytest.fixture(scope="module")
def system(collector: Collector) -> Iterator[RunningSystem]:
    """A system that sends its traces to the collector from its start on."""

    def traced(folder: Path) -> LocalStack:
        return LocalStack(folder, pool_target=POOL, connect_timeout=5.0, traces_url=collector.url)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds; by default 5 s
        with run_system(traced) as own:
            yield own


def order(
    system: RunningSystem, trader: Trader, trace_id: str, flags: str = "01"
) -> httpx.Response:
    body = {
        "client_order_id": trace_id,
        "account_id": trader.account_id,
        "symbol": "2330",
        "side": "buy",
        "quantity": 1,
        "price_type": "MKT",
        "time_in_force": "IOC",
    }
    headers = {"X-API-Key": trader.api_key, "traceparent": f"00-{trace_id}-{'b' * 16}-{flags}"}
    url = f"{system.stack.api_url}/v1/users/{trader.user_id}/orders"
    return httpx.post(
        url, json=body, headers=headers, params={"wait": 30}, timeout=PATIENCE, trust_env=False
    )


@pytest.mark.timeout(240)
def test_an_order_is_one_trace_from_the_request_to_the_fill(
    system: RunningSystem, collector: Collector
) -> None:
    trader = system.trader()
    placed = order(system, trader, "a" * 32)
    assert placed.json()["state"] == "filled", placed.text
    spans = collector.await_names("a" * 32, {REQUEST, *ORDER, *CLAIM})
    order_id = placed.json()["id"]
    for name in ORDER - {"broker place"}:
        assert attributes(spans[name])["berth.order"] == order_id
        assert spans[name].parent_span_id == spans[REQUEST].span_id
    at_broker, filled = spans["broker place"], spans["order filled"]
    assert attributes(filled)["berth.fill"]
    assert at_broker.end_time_unix_nano > at_broker.start_time_unix_nano
    assert spans["RunWorkflow:UserWorkerWorkflow"].start_time_unix_nano < filled.end_time_unix_nano
    secrets = {trader.api_key, "secret"}
    assert not secrets & {text for span in collector.spans for text in attributes(span).values()}


def test_an_order_that_meets_a_worker_has_a_trace_without_a_claim(
    system: RunningSystem, collector: Collector
) -> None:
    trader = system.trader()
    system.start_until_active(trader)
    assert order(system, trader, "c" * 32).json()["state"] == "filled"
    assert not CLAIM & set(collector.await_names("c" * 32, {REQUEST, *ORDER}))
    # What the caller does not sample is not traced.
    assert order(system, trader, "d" * 32, flags="00").json()["state"] == "filled"
    assert order(system, trader, "e" * 32).json()["state"] == "filled"
    collector.await_names("e" * 32, {REQUEST, *ORDER})
    assert not collector.trace("d" * 32)


def test_a_query_is_one_trace_to_the_broker(system: RunningSystem, collector: Collector) -> None:
    trader = system.trader()
    path = (
        f"{system.stack.api_url}/v1/users/{trader.user_id}/accounts/{trader.account_id}/positions"
    )
    headers = {"X-API-Key": trader.api_key, "traceparent": f"00-{'f' * 32}-{'b' * 16}-01"}
    assert httpx.get(path, headers=headers, timeout=PATIENCE, trust_env=False).is_success
    collector.await_names("f" * 32, {"broker query", *CLAIM})


def test_a_signal_is_one_trace_to_the_fill_and_none_shows_its_address(
    system: RunningSystem, collector: Collector
) -> None:
    trader = system.trader()
    path, body = (
        f"/v1/users/{trader.user_id}/webhooks",
        {"account_id": trader.account_id, "quantity_unit": "lots"},
    )
    hook = system.call("POST", path, trader.api_key, json=body).json()
    alert = {
        "secret": hook["secret"],
        "action": "long_entry",
        "symbol": "2330",
        "quantity": 1,
        "price_type": "MKT",
        "time": datetime.now(UTC).isoformat(),
    }
    taken = system.call("POST", hook["path"], "", json=alert)
    assert taken.is_success, taken.text

    def span() -> Span | None:
        return next((span for span in list(collector.spans) if span.name == "webhook signal"), None)

    alerted = until(span, "the span of the alert")
    assert attributes(alerted) == {"berth.webhook": hook["id"]}
    spans = collector.await_names(alerted.trace_id.hex(), {*ORDER, *CLAIM})
    assert {spans[name].parent_span_id for name in ORDER} == {alerted.span_id}
    shown = {text for span in collector.spans for text in (span.name, *attributes(span).values())}
    assert not [text for text in shown if hook["token"] in text or hook["secret"] in text]


def test_a_collector_that_does_not_answer_delays_no_order(
    system: RunningSystem, collector: Collector
) -> None:
    trader = system.trader()
    system.start_until_active(trader)
    collector.answering.clear()
    for digit in "123":
        placed = order(system, trader, digit * 32)
        assert placed.json()["state"] == "filled"
        assert placed.elapsed.total_seconds() < 5.0
    until(lambda: collector.trace("3" * 32), "spans that are sent all the same")
