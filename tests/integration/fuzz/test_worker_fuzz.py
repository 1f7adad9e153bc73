"""No message ends a worker's session: absurd requests and control messages, well signed, at a real
worker."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from hypothesis import given
from hypothesis import strategies as st

from tests.integration.worker.conftest import harness
from tests.support import absurd_messages
from tests.support.fuzzing import fuzz_settings, fuzz_timeout
from tests.support.workers.harness import WorkerHarness
from worker_runtime.protocol.messages import Connect, ReloadCredentials, Signed, encode
from worker_runtime.protocol.requests import Request

__all__ = ["harness"]  # a fixture

USER, WORKER, REQUEST = "the user", "the worker", "the request"

KNOWN = absurd_messages.plausible(
    user_id=[USER],
    worker_id=[WORKER],
    request_id=[REQUEST],
    account_id=["a1", "a2"],
    order_id=["6a3f3c1e-0b0c-4f6e-9f5e-1d2c3b4a5968", REQUEST],
    generation=["g1"],
    reply_to=["berth:answers:test"],
    tag=["t1", "t2"],
    tags=[[], ["t1"]],
    connect_timeout=[1.0],
    epoch=[1],
)
requests = st.lists(absurd_messages.messages(Request, KNOWN), min_size=1, max_size=12)
#: Not `Shutdown`, which may end a worker, nor `Claim`, for which there is a test of its own.
signed = st.lists(
    st.one_of(
        absurd_messages.messages(ReloadCredentials, KNOWN), absurd_messages.messages(Connect, KNOWN)
    ),
    max_size=6,
)


def about(harness: WorkerHarness, message: Any, request_id: str) -> bytes:
    text = absurd_messages.encoded(message).replace(USER.encode(), harness.user.encode())
    text = text.replace(WORKER.encode(), harness.workers[0].worker_id.encode())
    return text.replace(REQUEST.encode(), request_id.encode())


@fuzz_settings
@fuzz_timeout
@given(asked=requests, told=signed)
def test_no_request_and_no_control_message_ends_a_session(
    harness: WorkerHarness, asked: list[Any], told: list[Any]
) -> None:
    worker = harness.workers[0] if harness.workers else harness.active()
    before = worker.pid
    for message in told:
        payload = about(harness, message, "r")
        item = encode(Signed(payload=payload, signatures=[harness.key.sign(payload)]))
        if message["type"] == "connect":
            harness.push_raw(worker, item)
        else:
            harness.control_raw(item)
    for message in asked:
        request_id = str(uuid4())
        harness.enqueue_raw(request_id, about(harness, message, request_id))
    # In a symbol of its own: an order of unknown outcome may block another's.
    order = harness.order(symbol=f"S{uuid4().hex[:8]}")
    harness.enqueue(order)
    assert harness.answer(order.request_id).request_id == order.request_id
    assert worker.pid == before
    assert harness.metadata()["session"] == "1"
