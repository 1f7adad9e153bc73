"""Contains a logged-in browser, and reads the operators' page with it."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from api.http.auth import CSRF_HEADER
from tests.support.systems.api import ServedApi


@asynccontextmanager
async def logged_in_browser(api: ServedApi, key: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client with cookies, logged in by a key."""
    transport = httpx.ASGITransport(api.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api", timeout=40) as client:
        if key:
            answer = await client.post("/page/login", data={"key": key})
            assert answer.status_code == 303, answer.text
        yield client


async def csrf_header(client: httpx.AsyncClient, path: str = "/") -> dict[str, str]:
    """Returns the header with the CSRF token of a page."""
    match = re.search(r'name="csrf-token" content="(\w+)"', (await client.get(path)).text)
    assert match
    return {CSRF_HEADER: match[1]}


async def read_page(client: httpx.AsyncClient, path: str) -> str:
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    return html.unescape(answer.text)
