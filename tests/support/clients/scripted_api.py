"""Contains both producers of jobs before an API that answers by script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx

from infra.berth_jobs.send import AsyncProducer, Producer

URL, KEY = "http://api.example", "berth_canary"


@dataclass
class ScriptedProducerApi:
    """Gives the answers of a list, one for each request; the last one again and again."""

    #: Use the producer for asyncio.
    is_async: bool
    answers: list[httpx.Response | type[httpx.RequestError]] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)
    retry_for: float = 30.0

    def answer(self, body: Any, status: int = 200, **headers: str) -> None:
        self.answers.append(httpx.Response(status, json=body, headers=headers))

    def refuse(self, status: int, code: str, *, retryable: bool = False, **fields: Any) -> None:
        problem = {"code": code, "detail": "why", "title": "?", "retryable": retryable, **fields}
        self.answer(problem, status)

    def fail(self, error: type[httpx.RequestError]) -> None:
        self.answers.append(error)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, httpx.Response):
            content = _with_ids(request, answer.content)
            return httpx.Response(answer.status_code, content=content, headers=answer.headers)
        raise answer("scripted", request=request)

    def run(self, *steps: Callable[[Any], Any]) -> Any:
        """Give a producer to the first step, each result to the next step, and return the last
        result."""
        transport = httpx.MockTransport(self._handle)
        if not self.is_async:
            with Producer(
                URL, KEY, application="shop", transport=transport, retry_for=self.retry_for
            ) as producer:
                value: Any = producer
                for step in steps:
                    value = step(value)
                return value

        async def run() -> Any:
            async with AsyncProducer(
                URL, KEY, application="shop", transport=transport, retry_for=self.retry_for
            ) as producer:
                value: Any = producer
                for step in steps:
                    value = step(value)
                    if isinstance(value, Coroutine):
                        value = await value
                return value

        return asyncio.run(run())

    def bodies(self) -> list[Any]:
        return [json.loads(request.content) for request in self.requests if request.content]


def _with_ids(request: httpx.Request, content: bytes) -> bytes:
    """The answer to an enqueue, with the id of the job that was asked for where it has `own-id`."""
    if not request.content or b'"own-id"' not in content:
        return content
    asked = json.loads(request.content)
    jobs = asked.get("jobs", [asked])
    answer = json.loads(content)
    for view, job in zip(answer.get("jobs", [answer]), jobs, strict=True):
        view["id"] = job["options"]["job_id"] if view["id"] == "own-id" else view["id"]
    return json.dumps(answer).encode()


def job_view(state: str = "waiting", **changes: Any) -> dict[str, Any]:
    """A job as the API shows it."""
    return {
        "id": "own-id",
        "type": "shop/resize_image",
        "state": state,
        "ended": state in ("done", "failed", "cancelled"),
        "cancelling": False,
        "attempt": 0,
        "queued_at": "2026-11-27T01:00:00Z",
        "due_at": None,
        "started_at": None,
        "finished_at": "2026-11-27T01:00:01Z" if state == "done" else None,
        "progress": None,
        "value": None,
        "failure": None,
        **changes,
    }
