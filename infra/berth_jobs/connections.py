"""Where a producer's requests go: the API over httpx, or a fake API in tests (`testing`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import httpx

from .api_calls import JobRequest
from .errors import NotConfigured, Unreachable

URL_VARIABLE, APPLICATION_VARIABLE = "BERTH_API_URL", "BERTH_JOBS_APPLICATION"
KEY_VARIABLE, KEY_FILE_VARIABLE = "BERTH_API_KEY", "BERTH_API_KEY_FILE"

C = TypeVar("C", httpx.Client, httpx.AsyncClient)


class ProducerSettings(NamedTuple):
    """Holds what a producer needs to know."""

    url: str
    api_key: str

    @classmethod
    def from_environment(cls) -> ProducerSettings:
        """Read `BERTH_API_URL` and `BERTH_API_KEY` or `BERTH_API_KEY_FILE`. Raises
        `NotConfigured`."""
        url = os.environ.get(URL_VARIABLE, "")
        if not url:
            raise NotConfigured(
                f"set {URL_VARIABLE}, such as http://127.0.0.1:8000, to enqueue jobs"
            )
        if key := os.environ.get(KEY_VARIABLE, ""):
            return cls(url, key)
        path = os.environ.get(KEY_FILE_VARIABLE, "")
        if not path:
            raise NotConfigured(f"set {KEY_VARIABLE}, or {KEY_FILE_VARIABLE}, to enqueue jobs")
        try:
            return cls(url, Path(path).read_text(encoding="ascii").strip())
        except (OSError, UnicodeDecodeError) as error:
            raise NotConfigured(f"{KEY_FILE_VARIABLE}: cannot read {path}: {error}") from None

    def httpx_arguments(self) -> dict[str, Any]:
        """Return the arguments of an httpx client. Raises `NotConfigured`.

        The key goes to the API only:
        no proxy of the environment is used, and redirects are not followed.
        """
        url, key = self
        if not url.startswith(("http://", "https://")):
            raise NotConfigured(
                f"{url!r} is not a Berth API URL; it begins with http:// or https://"
            )
        if not (key.isascii() and key.isprintable() and key) or " " in key:
            raise NotConfigured("the API key is empty, or has characters that no key has")
        try:
            base_url = httpx.URL(f"{url.rstrip('/')}/v1")
        except httpx.InvalidURL as error:
            raise NotConfigured(f"{url!r} is not a URL: {error}") from None
        return {"base_url": base_url, "headers": {"X-API-Key": key}, "trust_env": False}


class Connection(Generic[C]):
    """An httpx client that is made when it is first needed. Threads may share it."""

    def __init__(self, make: Callable[[], tuple[str, C]]) -> None:
        self._make: Callable[[], tuple[str, C]] = make
        self._lock = threading.Lock()
        self._made: tuple[str, C] | None = None

    def open(self) -> tuple[str, C]:
        """Return the API's URL and the client. Raises `NotConfigured`."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def take(self) -> C | None:
        """Return the client for the caller to close; None if none was made."""
        with self._lock:
            made, self._made = self._made, None
        return made[1] if made is not None else None


class FakeApi(Protocol):
    """Answers the requests of all producers of this process in place of the API."""

    def answer(self, request: JobRequest) -> httpx.Response:
        """Return the answer. Raises what the test is to see."""
        ...


_fakes: list[FakeApi] = []


def push_fake(fake: FakeApi) -> None:
    """Send the requests of all producers of this process to `fake`, until `pop_fake`."""
    _fakes.append(fake)


def pop_fake(fake: FakeApi) -> None:
    """End `push_fake`."""
    _fakes.remove(fake)


def current_fake() -> FakeApi | None:
    """Return the fake API that was pushed last; None outside of tests."""
    return _fakes[-1] if _fakes else None


def send_blocking(
    connection: Connection[httpx.Client], request: JobRequest
) -> httpx.Response | Unreachable:
    """Send one request and return the answer, or why there is none."""
    if (fake := current_fake()) is not None:
        return fake.answer(request)
    url, client = connection.open()
    try:
        return client.request(**request.httpx_arguments())
    except httpx.RequestError as error:
        return Unreachable.of(url, error)


async def send_async(
    connection: Connection[httpx.AsyncClient], request: JobRequest
) -> httpx.Response | Unreachable:
    """Send one request and return the answer, or why there is none."""
    if (fake := current_fake()) is not None:
        return fake.answer(request)
    url, client = connection.open()
    try:
        return await client.request(**request.httpx_arguments())
    except httpx.RequestError as error:
        return Unreachable.of(url, error)
