"""Event streams that come back by themselves: what has to be known of one, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx
import msgspec

from .errors import ApiError, BerthClientError, UnexpectedAnswer, Unreachable

#: Seconds without a byte after which a stream counts as lost; the API sends a comment every 15 s.
SILENCE_TIMEOUT_S = 45.0
#: Seconds before a lost stream is opened again, unless the API says otherwise; doubled while that
#: fails, up to the second.
RECONNECT_INTERVAL_S, MAX_RECONNECT_INTERVAL_S = 1.0, 10.0

T = TypeVar("T")


@dataclass(frozen=True)
class StreamEvent(Generic[T]):
    """An event. A program that ends may continue behind `id` later (`after`)."""

    id: int
    name: str
    data: T


class EventParser:
    """Reads server-sent events with name, id and data, as they come in; all else is passed over.

    Lines end at line feeds only: data may hold other
    characters at which `str.splitlines` would end one.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._fields: dict[bytes, bytes] = {}
        #: Seconds to wait before the stream is opened again.
        self.again = RECONNECT_INTERVAL_S

    def reset(self) -> None:
        """Forgets half an event: another answer begins."""
        self._rest = b""
        self._fields = {}

    def feed(self, chunk: bytes) -> list[tuple[str, int, bytes]]:
        """Name, id and data of the events that are complete now."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            name, _, value = line.removesuffix(b"\r").partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data" and name in self._fields:
                self._fields[name] += b"\n" + value
            elif name:
                self._fields[name] = value
            elif line.removesuffix(b"\r") == b"":
                if (event := self._event()) is not None:
                    events.append(event)
                self._fields = {}
        return events

    def _event(self) -> tuple[str, int, bytes] | None:
        if (retry := self._fields.get(b"retry", b"")).isdigit():
            self.again = int(retry) / 1000
        number, data = self._fields.get(b"id", b""), self._fields.get(b"data")
        if data is None or not number.isdigit():
            return None
        return self._fields.get(b"event", b"message").decode(), int(number), data


class Subscription(Generic[T]):
    """Where a stream is: which events have come, and when to open it again."""

    def __init__(self, path: str, kinds: Mapping[str, Any] | None, after: int | None) -> None:
        """Takes `kinds`, the type of the data by name of the event; passes over other events. None:
        JSON of any."""
        self._path = path
        self._kinds = kinds
        self._after = after
        self._parser = EventParser()
        self._opened = False
        self._failures = 0

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `httpx.Client.stream`, to open the stream behind the last
        event."""
        return {
            "method": "GET",
            "url": self._path,
            "headers": {} if self._after is None else {"Last-Event-ID": str(self._after)},
            "timeout": httpx.Timeout(SILENCE_TIMEOUT_S, connect=5.0),
        }

    def open(self, answer: httpx.Response) -> None:
        """Takes the head of an answer, and all of an error's. Raises `ApiError`,
        `UnexpectedAnswer`."""
        if answer.is_error:
            raise ApiError.of(answer)
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            raise UnexpectedAnswer(f"{answer.request.url.path} is no event stream of Berth")
        self._parser.reset()
        self._opened = True
        self._failures = 0

    def events_of(self, chunk: bytes) -> list[StreamEvent[T]]:
        """Returns the events that this piece of the answer completes. Raises `UnexpectedAnswer`.

        The stream continues behind the last one,
        so they are all handed out before the next piece is read.
        """
        events: list[StreamEvent[T]] = []
        for name, number, data in self._parser.feed(chunk):
            if self._kinds is None or name in self._kinds:
                kind: Any = Any if self._kinds is None else self._kinds[name]
                try:
                    decoded: T = msgspec.json.decode(data, type=kind)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise UnexpectedAnswer(
                        f"event {name} {number} of {self._path}: {error}"
                    ) from None
                events.append(StreamEvent(number, name, decoded))
            self._after = number
        return events

    def pause(self, failure: BerthClientError | None) -> float:
        """Returns the seconds until the stream is opened again; None if it ended. Raises a failure
        that does not pass."""
        requested_pause = 0.0
        if failure is not None:
            passes = isinstance(failure, Unreachable)
            if isinstance(failure, ApiError):
                passes = failure.retryable or failure.status >= 500
                requested_pause = failure.retry_after or 0.0
            if not (passes and self._opened):
                raise failure
        again = self._parser.again
        seconds = min(again * (1 << self._failures), max(again, MAX_RECONNECT_INTERVAL_S))
        self._failures = min(self._failures + 1, 10)
        return max(seconds, requested_pause)
