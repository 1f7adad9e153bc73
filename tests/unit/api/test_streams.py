"""Event streams of rows from a fake feed: what they send, when they end, how many may be open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from starlette.types import Message

from api.http.errors import TooManyStreams, Unauthenticated
from api.http.notifications import NotificationListener
from api.http.streams import MAX_STREAMS_PER_KEY, MAX_STREAMS_PER_SUBJECT, EventStreams, ServerEvent
from infra.database.engine import DatabaseUnavailable


class FakeFeed:
    """Serves rows from memory. `failures` reads fail before one succeeds again."""

    channel = "rows"
    key = "alice"

    def __init__(self, *rows: int, page: int = 2) -> None:
        self.rows = list(rows)
        self.page = page
        self.failures = 0

    async def current_event(self) -> ServerEvent:
        return ServerEvent(self.rows[-1] if self.rows else 0, "state", "{}")

    async def events_after(self, last: int) -> Sequence[ServerEvent]:
        if self.failures:
            self.failures -= 1
            raise DatabaseUnavailable
        return [ServerEvent(row, "row", f'{{"n":{row}}}') for row in self.rows if row > last][
            : self.page
        ]


@pytest.fixture
def notices() -> NotificationListener:
    """Returns a listener that is not started: it has no notices but those that a test gives."""
    return NotificationListener("postgresql+asyncpg://nobody@127.0.0.1:1/none", ("rows",))


async def never(key_id: str) -> bool:
    return False


async def sent(
    streams: EventStreams, feed: FakeFeed, after: int | None, *, holder: str = "key"
) -> AsyncIterator[str]:
    answer = await streams.open_stream(feed, holder, after)
    async for chunk in answer.body_iterator:
        assert isinstance(chunk, bytes)
        yield chunk.decode()


async def until_id(stream: AsyncIterator[str], event_id: int) -> list[str]:
    chunks = []
    async for chunk in stream:
        chunks.append(chunk)
        if f"id: {event_id}\n" in chunk:
            return chunks
    raise AssertionError(f"the stream ended before {event_id}: {chunks}")


async def test_a_stream_sends_every_row_behind_an_id_page_after_page(
    notices: NotificationListener,
) -> None:
    stream = sent(EventStreams(notices, never), FakeFeed(3, 5, 8, 9, 12), 3)
    chunks = await until_id(stream, 12)
    assert chunks[0] == "retry: 1000\n\n"
    assert chunks[1] == 'event: row\ndata: {"n":5}\nid: 5\n\n'
    assert [chunk.split("id: ")[1].strip() for chunk in chunks[1:]] == ["5", "8", "9", "12"]


async def test_a_stream_that_begins_now_sends_the_present_and_no_row_of_the_past(
    notices: NotificationListener,
) -> None:
    feed = FakeFeed(1, 2)
    stream = sent(EventStreams(notices, never, heartbeat=0.05), feed, None)
    assert await until_id(stream, 2) == ["retry: 1000\n\n", "event: state\ndata: {}\nid: 2\n\n"]
    assert await anext(stream) == ": alive\n\n"
    feed.rows.append(3)
    assert (await until_id(stream, 3))[-1] == 'event: row\ndata: {"n":3}\nid: 3\n\n'


async def test_a_notice_is_answered_long_before_the_heartbeat(
    notices: NotificationListener,
) -> None:
    feed = FakeFeed(1)
    stream = sent(EventStreams(notices, never, heartbeat=3600.0), feed, 0)
    await until_id(stream, 1)
    coming = asyncio.ensure_future(until_id(stream, 2))
    await asyncio.sleep(0)
    feed.rows.append(2)
    notices._notify(None, 0, "rows", "bob")
    notices._notify(None, 0, "rows", "alice")
    assert await asyncio.wait_for(coming, 10) == ['event: row\ndata: {"n":2}\nid: 2\n\n']


async def test_a_database_that_fails_under_a_stream_delays_it_and_loses_nothing(
    notices: NotificationListener,
) -> None:
    feed = FakeFeed(1)
    stream = sent(EventStreams(notices, never, heartbeat=0.02), feed, 0)
    await until_id(stream, 1)
    feed.failures = 3
    feed.rows += [2, 3]
    chunks = await until_id(stream, 3)
    assert [chunk for chunk in chunks if "id: " in chunk] == [
        'event: row\ndata: {"n":2}\nid: 2\n\n',
        'event: row\ndata: {"n":3}\nid: 3\n\n',
    ]
    assert ": alive\n\n" in chunks


async def test_a_database_that_is_down_at_the_start_is_an_error_and_takes_no_place(
    notices: NotificationListener,
) -> None:
    streams, feed = EventStreams(notices, never), FakeFeed(1)
    feed.failures = 1
    with pytest.raises(DatabaseUnavailable):
        await streams.open_stream(feed, "key", 0)
    assert streams.open == 0


async def test_streams_end_when_the_server_stops_and_after_their_life(
    notices: NotificationListener,
) -> None:
    streams = EventStreams(notices, never, heartbeat=3600.0)
    stream = sent(streams, FakeFeed(1), 0)
    await until_id(stream, 1)
    ending = asyncio.ensure_future(anext(stream, "ended"))
    await asyncio.sleep(0)
    streams.end()
    assert await asyncio.wait_for(ending, 10) == "ended"

    short = sent(EventStreams(notices, never, heartbeat=0.02, life=0.1), FakeFeed(1), 0)
    chunks = [chunk async for chunk in short]
    assert chunks[1] == 'event: row\ndata: {"n":1}\nid: 1\n\n'
    assert set(chunks[2:]) <= {": alive\n\n"}


async def test_streams_of_a_key_for_a_user_are_limited_and_a_closed_one_makes_room(
    notices: NotificationListener,
) -> None:
    streams = EventStreams(notices, never, heartbeat=3600.0)
    answers = [
        await streams.open_stream(FakeFeed(), "key", 0) for _ in range(MAX_STREAMS_PER_SUBJECT)
    ]
    with pytest.raises(TooManyStreams):
        await streams.open_stream(FakeFeed(), "key", 0)
    other = await streams.open_stream(FakeFeed(), "another key", 0)

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def nowhere(message: Message) -> None:
        await asyncio.sleep(0)

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    await asyncio.wait_for(answers[0](scope, gone, nowhere), 10)
    assert streams.open == MAX_STREAMS_PER_SUBJECT
    await streams.open_stream(FakeFeed(), "key", 0)
    assert other.media_type == "text/event-stream"


async def test_one_key_does_not_take_all_places(notices: NotificationListener) -> None:
    streams = EventStreams(notices, never)
    for number in range(MAX_STREAMS_PER_KEY):
        feed = FakeFeed()
        feed.key = f"user-{number}"
        await streams.open_stream(feed, "key", 0)
    with pytest.raises(TooManyStreams, match="of this key"):
        await streams.open_stream(FakeFeed(), "key", 0)
    await streams.open_stream(FakeFeed(), "another key", 0)


async def test_a_reader_that_takes_nothing_loses_its_place(notices: NotificationListener) -> None:
    streams = EventStreams(notices, never, heartbeat=3600.0, slowest=0.05)
    answer = await streams.open_stream(FakeFeed(1, 2, 3), "key", 0)

    async def here() -> Message:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def stuck(message: Message) -> None:
        """Waits, as uvicorn does while the client's buffers are full."""
        if message["type"] == "http.response.body":
            await asyncio.get_running_loop().create_future()

    for version in ("2.3", "2.4"):
        scope = {"type": "http", "asgi": {"spec_version": version}}
        await asyncio.wait_for(answer(scope, here, stuck), 10)
        assert streams.open == 0
        answer = await streams.open_stream(FakeFeed(1, 2, 3), "key", 0)


async def test_a_key_that_was_revoked_before_its_stream_was_counted_gets_none(
    notices: NotificationListener,
) -> None:
    async def revoked(key_id: str) -> bool:
        assert streams.holders() == {key_id}  # a notice from here on ends it
        return True

    streams = EventStreams(notices, revoked)
    assert streams.end_of("key") == 0
    with pytest.raises(Unauthenticated):
        await streams.open_stream(FakeFeed(1), "key", None)
    assert streams.open == 0
