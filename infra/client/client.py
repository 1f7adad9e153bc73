"""The two clients: `BerthClient` blocks, `AsyncBerthClient` is for asyncio. They have the same
methods.

    with BerthClient("http://127.0.0.1:8000", api_key) as berth:
        ticket = OrderTicket(
            account_id="main", symbol="2330", side="buy", quantity=1, price=Decimal(1005)
        )
        order = berth.place_order("alice", ticket)

What a method does stands in `calls.py`. The API key goes to the API only: no proxy of the
environment is used, and redirects are not followed.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from . import calls
from .calls import ApiRequest, Call
from .errors import BerthClientError, Unreachable
from .events import StreamEvent, Subscription

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(call: Callable[P, Call[T]]) -> Callable[Concatenate[BerthClient, P], T]:
    @functools.wraps(call)
    def method(client: BerthClient, /, *args: P.args, **given: P.kwargs) -> T:
        return client._run(call(*args, **given))

    return method


def _awaiting(
    call: Callable[P, Call[T]],
) -> Callable[Concatenate[AsyncBerthClient, P], Coroutine[Any, Any, T]]:
    @functools.wraps(call)
    async def method(client: AsyncBerthClient, /, *args: P.args, **given: P.kwargs) -> T:
        return await client._run(call(*args, **given))

    return method


def _iterating(
    begin: Callable[P, Subscription[T]],
) -> Callable[Concatenate[BerthClient, P], Generator[StreamEvent[T], None, None]]:
    @functools.wraps(begin)
    def method(
        client: BerthClient, /, *args: P.args, **given: P.kwargs
    ) -> Generator[StreamEvent[T], None, None]:
        return client._follow(begin(*args, **given))

    return method


def _async_iterating(
    begin: Callable[P, Subscription[T]],
) -> Callable[Concatenate[AsyncBerthClient, P], AsyncGenerator[StreamEvent[T], None]]:
    @functools.wraps(begin)
    def method(
        client: AsyncBerthClient, /, *args: P.args, **given: P.kwargs
    ) -> AsyncGenerator[StreamEvent[T], None]:
        return client._follow(begin(*args, **given))

    return method


def _settings(url: str, api_key: str) -> dict[str, Any]:
    """Returns the arguments of an httpx client. Raises `ValueError` for an invalid URL or key."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is not a Berth API URL. It begins with http:// or https://.")
    if not (api_key.isascii() and api_key.isprintable() and api_key) or " " in api_key:
        raise ValueError("this is no API key")
    try:
        base_url = httpx.URL(f"{url.rstrip('/')}/v1")
    except httpx.InvalidURL as error:
        raise ValueError(f"{url} is not a URL: {error}") from None
    return {"base_url": base_url, "headers": {"X-API-Key": api_key}, "trust_env": False}


class BerthClient:
    """Blocks. May be used by several threads. A context manager, or `close` it."""

    def __init__(
        self, url: str, api_key: str, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        """Connects to `url`, the API's address without `/v1`. `transport` is an
        `httpx.HTTPTransport` with your own TLS.

        Raises `ValueError` for a URL or a key that is not one.
        """
        self.url = url.rstrip("/")
        self._http = httpx.Client(**_settings(url, api_key), transport=transport)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _run(self, call: Call[T]) -> T:
        outcome: httpx.Response | Unreachable | None = None
        while True:
            try:
                step = call.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = None
            if isinstance(step, ApiRequest):
                outcome = self._send(step)
            else:
                time.sleep(step)

    def _send(self, request: ApiRequest) -> httpx.Response | Unreachable:
        try:
            return self._http.request(**request.options())
        except httpx.RequestError as error:
            return Unreachable(self.url, error)

    def _follow(self, subscription: Subscription[T]) -> Generator[StreamEvent[T], None, None]:
        while True:
            failure: BerthClientError | None = None
            try:
                with self._http.stream(**subscription.options()) as answer:
                    if answer.is_error:
                        answer.read()
                    subscription.open(answer)
                    for chunk in answer.iter_bytes():
                        yield from subscription.events_of(chunk)
            except httpx.RequestError as error:
                failure = Unreachable(self.url, error)
            except BerthClientError as error:
                failure = error
            time.sleep(subscription.pause(failure))

    request = _blocking(calls.request)
    create_user = _blocking(calls.create_user)
    get_own_key = _blocking(calls.get_own_key)
    list_api_keys = _blocking(calls.list_api_keys)
    create_api_key = _blocking(calls.create_api_key)
    rotate_api_key = _blocking(calls.rotate_api_key)
    revoke_api_key = _blocking(calls.revoke_api_key)
    store_credentials = _blocking(calls.store_credentials)
    get_positions = _blocking(calls.get_positions)
    get_balance = _blocking(calls.get_balance)
    get_instrument = _blocking(calls.get_instrument)
    list_instruments = _blocking(calls.list_instruments)
    place_order = _blocking(calls.place_order)
    cancel_order = _blocking(calls.cancel_order)
    replace_order = _blocking(calls.replace_order)
    get_order = _blocking(calls.get_order)
    list_orders = _blocking(calls.list_orders)
    get_worker = _blocking(calls.get_worker)
    start_worker = _blocking(calls.start_worker)
    stop_worker = _blocking(calls.stop_worker)
    follow_orders = _iterating(calls.follow_orders)
    follow_worker = _iterating(calls.follow_worker)
    follow = _iterating(calls.follow)


class AsyncBerthClient:
    """Calls the API from asyncio. Use it as an asynchronous context manager, or `aclose` it.

    Close an event stream that is not read to its end (`contextlib.aclosing`), so that its
    connection is free.
    """

    def __init__(
        self, url: str, api_key: str, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """Connects as `BerthClient` does; `transport` is an `httpx.AsyncHTTPTransport`."""
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(**_settings(url, api_key), transport=transport)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.aclose()

    async def _run(self, call: Call[T]) -> T:
        answer: httpx.Response | Unreachable | None = None
        while True:
            try:
                step = call.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = None
            if isinstance(step, ApiRequest):
                answer = await self._send(step)
            else:
                await asyncio.sleep(step)

    async def _send(self, request: ApiRequest) -> httpx.Response | Unreachable:
        try:
            return await self._http.request(**request.options())
        except httpx.RequestError as error:
            return Unreachable(self.url, error)

    async def _follow(self, subscription: Subscription[T]) -> AsyncGenerator[StreamEvent[T], None]:
        while True:
            failure: BerthClientError | None = None
            try:
                async with self._http.stream(**subscription.options()) as answer:
                    if answer.is_error:
                        await answer.aread()
                    subscription.open(answer)
                    async for chunk in answer.aiter_bytes():
                        for event in subscription.events_of(chunk):
                            yield event
            except httpx.RequestError as error:
                failure = Unreachable(self.url, error)
            except BerthClientError as error:
                failure = error
            await asyncio.sleep(subscription.pause(failure))

    request = _awaiting(calls.request)
    create_user = _awaiting(calls.create_user)
    get_own_key = _awaiting(calls.get_own_key)
    list_api_keys = _awaiting(calls.list_api_keys)
    create_api_key = _awaiting(calls.create_api_key)
    rotate_api_key = _awaiting(calls.rotate_api_key)
    revoke_api_key = _awaiting(calls.revoke_api_key)
    store_credentials = _awaiting(calls.store_credentials)
    get_positions = _awaiting(calls.get_positions)
    get_balance = _awaiting(calls.get_balance)
    get_instrument = _awaiting(calls.get_instrument)
    list_instruments = _awaiting(calls.list_instruments)
    place_order = _awaiting(calls.place_order)
    cancel_order = _awaiting(calls.cancel_order)
    replace_order = _awaiting(calls.replace_order)
    get_order = _awaiting(calls.get_order)
    list_orders = _awaiting(calls.list_orders)
    get_worker = _awaiting(calls.get_worker)
    start_worker = _awaiting(calls.start_worker)
    stop_worker = _awaiting(calls.stop_worker)
    follow_orders = _async_iterating(calls.follow_orders)
    follow_worker = _async_iterating(calls.follow_worker)
    follow = _async_iterating(calls.follow)
