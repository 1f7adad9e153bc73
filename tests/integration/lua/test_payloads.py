"""What was put on the queue comes out byte by byte."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.lua_scripts import Scripts
from worker_runtime.protocol import keys, requests
from worker_runtime.protocol.scripts import ENQUEUE


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(payload=st.binary(max_size=300))
def test_a_payload_is_read_back_byte_by_byte(scripts: Scripts, payload: bytes) -> None:
    client = scripts.client
    client.flushall()
    places = [keys.seen("42", "r"), keys.requests("42"), keys.doorbell("42"), keys.mark("42")]
    client.eval(ENQUEUE.source, len(places), *places, "r", payload, 4_000_000_000_000, 1_000, "mac")
    [item] = client.lrange(keys.requests("42"), 0, -1)
    assert isinstance(item, bytes)
    frame = requests.parse_frame(item)
    assert (frame.request_id, frame.payload, frame.raw) == ("r", payload, item)
