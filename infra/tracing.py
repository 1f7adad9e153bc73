"""Traces: the spans that a process sends to an OpenTelemetry
collector (`BERTH_TRACES_URL`; off by default).

FastAPI makes the span of a request, Temporal's interceptor those of workflows and activities. A
worker makes none, so that its image needs no SDK: what it did is taken from its answers and events,
by its own times. An order's context is kept with its first event, so a fill that comes hours later
finds its trace.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from importlib.metadata import version

from worker_runtime.protocol.messages import Answer, OrderEvent

#: Seconds for the last spans when a process stops. The exporter would try for 10 s.
LAST_SPANS_TIMEOUT_S = 2.0


class Traces:
    def __init__(self, url: str, service: str) -> None:
        """Sends to `url`, which takes OTLP over HTTP. The collector shows this process under the
        name `service`."""
        # Here, so that a process that traces nothing does not load them.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        from temporalio.contrib.opentelemetry import TracingInterceptor

        about = {"service.name": service, "service.version": version("berth")}
        self.provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self.provider.get_tracer("berth")
        self._propagator = TraceContextTextMapPropagator()
        #: The interceptors for a client of Temporal.
        self.interceptors = [TracingInterceptor(self._tracer)]

    def span(self, name: str, **about: str) -> AbstractContextManager[object]:
        """Opens a span around a block; what begins there joins its trace."""
        attributes = {f"berth.{key}": value for key, value in about.items()}
        return self._tracer.start_as_current_span(
            name, attributes=attributes, record_exception=False
        )

    def context(self, name: str) -> str:
        """Returns the context (`traceparent`) of the present span, else of a new one; '' if it is
        not sampled."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        if not carrier:
            with self._tracer.start_as_current_span(name):
                self._propagator.inject(carrier)
        context = carrier.get("traceparent", "")
        return context if int(context[-2:] or "0", 16) & 1 else ""  # other flags may be set, too

    def add(self, name: str, context: str, began: float, ended: float, **about: str | int) -> None:
        """Adds a span to the trace of `context`, if there is one. Times are Unix seconds."""
        if context:
            parent = self._propagator.extract({"traceparent": context})
            attributes = {f"berth.{key}": value for key, value in about.items()}
            span = self._tracer.start_span(
                name, parent, attributes=attributes, start_time=round(began * 1e9)
            )
            span.end(round(max(began, ended) * 1e9))

    def add_order(
        self, order_id: str, context: str, answer: Answer, began: float, queued: float
    ) -> None:
        """Adds the stages of an order whose answer came just now. `began`, `queued`: on
        `time.monotonic`."""
        now = time.time()
        offset = now - time.monotonic()
        at_broker = (answer.broker_us or 0) / 1e6
        self.add("order accepted", context, began + offset, queued + offset, order=order_id)
        self.add("order queued", context, queued + offset, now - at_broker, order=order_id)
        self.add_broker_call("place", context, answer)

    def add_broker_call(self, call: str, context: str, answer: Answer) -> None:
        """Adds the broker's part of a request whose answer came just now."""
        if answer.broker_us is not None:
            code = "" if answer.failure is None else answer.failure.code
            now = time.time()
            self.add(f"broker {call}", context, now - answer.broker_us / 1e6, now, code=code)

    def add_event(self, event: OrderEvent, context: str) -> None:
        """Adds what a worker reported of an order, from when it happened until it was recorded."""
        about: dict[str, str | int] = {"order": event.order_id, "epoch": event.epoch}
        if event.fill is not None:
            about |= {"fill": event.fill.fill_id, "quantity": event.fill.quantity}
        self.add(f"order {event.state}", context, event.at_ms / 1000, time.time(), **about)


@asynccontextmanager
async def closing_traces(traces: Traces | None) -> AsyncIterator[None]:
    """Sends the last spans when the block is left, for `LAST_SPANS_TIMEOUT_S` seconds at most."""
    try:
        yield
    finally:
        if traces is not None:
            # A thread that nobody has to wait for:
            # a collector that does not answer would hold up the stop.
            sending = threading.Thread(target=traces.provider.shutdown, daemon=True)
            sending.start()
            await asyncio.to_thread(sending.join, LAST_SPANS_TIMEOUT_S)
