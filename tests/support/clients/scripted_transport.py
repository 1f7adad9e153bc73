"""Contains the Python client's two kinds before an API that answers by script."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any

import httpx

from infra.client.client import AsyncBerthClient, BerthClient
from infra.client.events import StreamEvent

URL, KEY = "http://api.example", "berth_canary"


@dataclass
class ScriptedTransport:
    """Gives the answers of a list, one for each request; the last one again and again."""

    #: Use the client for asyncio.
    asynchronous: bool
    answers: list[httpx.Response | type[httpx.RequestError]] = field(default_factory=list)
    asked: list[httpx.Request] = field(default_factory=list)

    def answer(self, body: Any, status: int = 200, **headers: str) -> None:
        self.answers.append(httpx.Response(status, json=body, headers=headers))

    def refuse(self, status: int, code: str, *, retryable: bool = False, **fields: Any) -> None:
        problem = {"code": code, "detail": "why", "title": "?", "retryable": retryable, **fields}
        self.answer(problem, status)

    def stream(self, text: str) -> None:
        """An event stream that ends after this text."""
        kind = {"Content-Type": "text/event-stream; charset=utf-8"}
        self.answers.append(httpx.Response(200, content=text.encode(), headers=kind))

    def fail(self, error: type[httpx.RequestError]) -> None:
        self.answers.append(error)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        scripted = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(scripted, httpx.Response):
            return httpx.Response(
                scripted.status_code, content=scripted.content, headers=scripted.headers
            )
        raise scripted("scripted", request=request)

    def run(self, call: Callable[[Any], Any]) -> Any:
        """What a call of the client returns."""
        transport = httpx.MockTransport(self._handle)
        if not self.asynchronous:
            with BerthClient(URL, KEY, transport=transport) as client:
                return call(client)

        async def run() -> Any:
            async with AsyncBerthClient(URL, KEY, transport=transport) as client:
                pending: Coroutine[Any, Any, Any] = call(client)
                return await pending

        return asyncio.run(run())

    def events(self, follow: Callable[[Any], Any], max_events: int) -> list[StreamEvent[Any]]:
        """The first events of a stream."""
        transport = httpx.MockTransport(self._handle)
        if not self.asynchronous:
            with (
                BerthClient(URL, KEY, transport=transport) as client,
                closing(follow(client)) as stream,
            ):
                return list(itertools.islice(stream, max_events))

        async def read() -> list[StreamEvent[Any]]:
            events: list[StreamEvent[Any]] = []
            async with (
                AsyncBerthClient(URL, KEY, transport=transport) as client,
                aclosing(follow(client)) as stream,
            ):
                async for event in stream:
                    events.append(event)
                    if len(events) == max_events:
                        break
            return events

        return asyncio.run(read())

    def bodies(self) -> list[Any]:
        return [json.loads(request.content) for request in self.asked]
