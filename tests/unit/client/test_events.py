"""Event streams are read in any pieces, opened again behind the last event, and ended by a final
error."""

from __future__ import annotations

import itertools
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.client.errors import ApiError, UnexpectedAnswer, Unreachable
from infra.client.events import MAX_RECONNECT_INTERVAL_S, EventParser, Subscription
from infra.client.models import PresentWorkerState, StateTransition
from tests.support.clients.scripted_transport import ScriptedTransport

PATH = "/users/alice/worker/events"


def event(number: int) -> str:
    return f'event: transition\ndata: {{"id": {number}}}\nid: {number}\n\n'


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8")), max_size=5),
    end=st.sampled_from(["\n", "\r\n"]),
    data=st.data(),
)
def test_events_are_the_same_in_whatever_pieces_they_come(
    texts: list[str], end: str, data: st.DataObject
) -> None:
    """Also with characters in their data at which `str.splitlines` ends a line."""
    bodies = [json.dumps({"reason": text}, ensure_ascii=False) for text in texts]
    lines = itertools.chain.from_iterable(
        (": alive", "", "retry: 20", "", "event: order", f"data: {body}", f"id: {number}", "")
        for number, body in enumerate(bodies)
    )
    sent = "".join(line + end for line in lines).encode()
    parser, events, begin = EventParser(), [], 0
    for cut in [*sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=6))), len(sent)]:
        events += parser.feed(sent[begin:cut])
        begin = cut
    assert events == [("order", number, body.encode()) for number, body in enumerate(bodies)]
    assert parser.again == (0.02 if texts else 1.0)


def test_a_stream_that_is_cut_is_opened_again_behind_its_last_event(api: ScriptedTransport) -> None:
    api.stream(f"retry: 10\n\n{event(4)}: alive\n\n{event(5)}event: transition\ndata: half")
    api.refuse(503, "DATABASE_UNAVAILABLE", retryable=True)
    api.fail(httpx.ConnectError)
    api.stream(event(6))
    received = api.events(lambda client: client.follow(PATH, 3), 3)
    assert [
        (stream_event.id, stream_event.name, stream_event.data) for stream_event in received
    ] == [(n, "transition", {"id": n}) for n in (4, 5, 6)]
    assert [request.headers["Last-Event-ID"] for request in api.asked] == ["3", "5", "5", "5"]


def test_a_stream_that_the_api_refuses_later_ends_with_its_error(api: ScriptedTransport) -> None:
    api.stream(f"retry: 10\n\n{event(4)}")
    api.refuse(401, "UNAUTHENTICATED")
    with pytest.raises(ApiError, match="UNAUTHENTICATED"):
        api.events(lambda client: client.follow(PATH), 2)
    assert [request.headers.get("Last-Event-ID") for request in api.asked] == [None, "4"]


def test_a_stream_that_cannot_be_opened_is_an_error_at_once(api: ScriptedTransport) -> None:
    api.refuse(503, "DATABASE_UNAVAILABLE", retryable=True)
    api.fail(httpx.ConnectError)
    api.answer({})
    for error in (ApiError, Unreachable, UnexpectedAnswer):
        with pytest.raises(error):
            api.events(lambda client: client.follow(PATH), 1)


def test_data_have_their_types_and_unknown_events_are_passed_over(api: ScriptedTransport) -> None:
    state = dict.fromkeys(("state", "since", "reason", "worker_id", "epoch", "deadline")) | {
        "user_id": "alice"
    }
    change = {
        "id": 8,
        "at": "2026-11-21T01:00:00Z",
        "before": "Connecting",
        "after": "Active",
        "reason": "",
    }
    change |= {"worker_id": "w-1", "epoch": 3, "deadline": None}
    for name, number, data in (("state", 6, state), ("news", 7, {}), ("transition", 8, change)):
        api.stream(f"retry: 10\n\nevent: {name}\ndata: {json.dumps(data)}\nid: {number}\n\n")
    first, second = api.events(lambda client: client.follow_worker("alice"), 2)
    assert isinstance(first.data, PresentWorkerState)
    assert isinstance(second.data, StateTransition)
    assert (second.id, second.data.after, second.data.epoch) == (8, "Active", 3)
    assert [request.headers.get("Last-Event-ID") for request in api.asked] == [None, "6", "7"]


def test_data_of_another_shape_are_an_error_and_not_passed_over(api: ScriptedTransport) -> None:
    api.stream('event: order\ndata: {"id": "o-1"}\nid: 4\n\n')
    with pytest.raises(UnexpectedAnswer, match="event order 4"):
        api.events(lambda client: client.follow_orders("alice"), 1)


def test_pauses_double_while_a_stream_cannot_be_opened_and_end_with_it() -> None:
    subscription: Subscription[object] = Subscription(PATH, None, None)
    request = httpx.Request("GET", "http://api.example")
    ok = httpx.Response(200, headers={"Content-Type": "text/event-stream"}, request=request)
    gone = Unreachable("http://api.example", httpx.ConnectError("gone"))
    subscription.open(ok)
    assert [subscription.pause(gone) for _ in range(6)] == [
        1,
        2,
        4,
        8,
        MAX_RECONNECT_INTERVAL_S,
        MAX_RECONNECT_INTERVAL_S,
    ]
    subscription.open(ok)
    assert subscription.pause(None) == 1
