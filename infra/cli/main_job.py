"""The main job: one order of a demo user without a worker, through the REST API to its fill."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from infra.exchange.client import ExchangeAdmin
from infra.vault import key_file
from worker_runtime.protocol.errors import BerthError

USER = "demo"
SYMBOL = "2330"
#: Seconds the whole order may take; from a full pool it takes well under one.
PATIENCE = 30.0


class MainJobFailed(BerthError):
    """The main job did not end with a filled order."""

    code = "JOB_FAILED"


@dataclass(frozen=True)
class MainJobResult:
    user_id: str
    api_key: str = field(repr=False)
    #: The order as `GET /v1/orders/{id}` shows it, with its timeline.
    order: dict[str, Any]
    #: From sending the request until the answer.
    seconds: float


def run_main_job(api_url: str, exchange_admin_url: str, keys: Path) -> MainJobResult:
    """Runs the job once. `keys` holds `admin.key`, and keeps the demo user's key. Raises `MainJobFailed`."""
    admin_key = key_file.read_key_file(keys / "admin.key", private=True).decode().strip()
    demo = keys / "demo.key"
    known = key_file.read_key_file(demo, private=True).decode().strip() if demo.exists() else ""
    return asyncio.run(_run_with_client(api_url, exchange_admin_url, admin_key, demo, known))


async def _run_with_client(
    api_url: str, exchange_admin_url: str, admin_key: str, demo: Path, known: str
) -> MainJobResult:
    async with httpx.AsyncClient(base_url=api_url, timeout=PATIENCE, trust_env=False) as http:
        try:
            api_key, user_id = await _ensure_user(http, admin_key, demo, known)
            await _stop_worker(http, api_key, user_id)
            await _store_credentials(http, api_key, user_id, exchange_admin_url)
            return await _place_order(http, api_key, user_id)
        except httpx.HTTPError as error:
            raise MainJobFailed(f"the API did not answer: {type(error).__name__} {error}") from error


async def _ensure_user(http: httpx.AsyncClient, admin_key: str, kept: Path, known: str) -> tuple[str, str]:
    """The demo user's key and id. A key is shown only once: without the kept one a new user is made."""
    if known:
        user_id, _, api_key = known.partition(" ")
        seen = await http.get(f"/v1/users/{user_id}/worker", headers={"X-API-Key": api_key})
        if seen.status_code not in (401, 403, 404):
            return api_key, user_id
    for user_id in (USER, f"{USER}-{secrets.token_hex(3)}"):
        made = await http.post("/v1/users", json={"user_id": user_id}, headers={"X-API-Key": admin_key})
        if made.status_code != 409:
            break
    body = _checked(made)
    key_file.write_key_file(kept, f"{user_id} {body['api_key']}\n".encode(), private=True)
    return str(body["api_key"]), user_id


async def _stop_worker(http: httpx.AsyncClient, api_key: str, user_id: str) -> None:
    """Stops the user's worker: after a restart its workflow has claimed a new one already."""
    path, headers = f"/v1/users/{user_id}/worker", {"X-API-Key": api_key}
    stopped = await http.post(f"{path}/stop", json={"reason": "the demo starts afresh"}, headers=headers)
    if stopped.status_code in (404, 409):  # there is none
        return
    _checked(stopped)
    deadline = time.monotonic() + PATIENCE
    while True:
        seen = _checked(await http.get(path, headers=headers))
        lifecycle = seen["lifecycle"]
        if not seen["live"] and (lifecycle is None or lifecycle["state"] == "Terminated"):
            return
        if time.monotonic() > deadline:
            raise MainJobFailed(f"the worker of {user_id} is {seen['state']} {PATIENCE:.0f} s after its stop")
        await asyncio.sleep(0.05)


async def _store_credentials(
    http: httpx.AsyncClient, api_key: str, user_id: str, exchange_admin_url: str
) -> None:
    """Makes new keys at the exchange and stores them in the vault, so that no clear secret is kept."""
    secret = {"api_key": secrets.token_urlsafe(16), "secret_key": secrets.token_urlsafe(32)}
    account = f"{user_id}-account"
    async with ExchangeAdmin(exchange_admin_url) as exchange:
        await exchange.register(account, secret["api_key"], secret["secret_key"])
    stored = await http.put(
        f"/v1/users/{user_id}/accounts/{account}/credentials",
        json={"broker": "paper", "simulation": True, **secret},
        headers={"X-API-Key": api_key},
    )
    _checked(stored)


async def _place_order(http: httpx.AsyncClient, api_key: str, user_id: str) -> MainJobResult:
    order = {
        "client_order_id": f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        "account_id": f"{user_id}-account",
        "symbol": SYMBOL,
        "side": "buy",
        "quantity": 1,
        "price_type": "MKT",
        "time_in_force": "IOC",
    }
    headers = {"X-API-Key": api_key}
    started = time.perf_counter()
    answer = _checked(await http.post(f"/v1/users/{user_id}/orders", json=order, headers=headers))
    seconds = time.perf_counter() - started
    deadline = time.monotonic() + PATIENCE
    while True:
        seen = _checked(await http.get(f"/v1/orders/{answer['id']}", headers=headers))
        steps = {step["step"] for step in seen["timeline"]}
        if seen["final"] and seen["state"] in steps:
            break
        if time.monotonic() > deadline:
            raise MainJobFailed(f"order {answer['id']} is {seen['state']} after {PATIENCE:.0f} s")
        await asyncio.sleep(0.05)  # the recorder writes the events a moment after the answer
    if seen["state"] != "filled":
        raise MainJobFailed(
            f"order {answer['id']} is {seen['state']}: {seen['code'] or ''} {seen['reason'] or ''}".strip()
        )
    return MainJobResult(user_id, api_key, seen, seconds)


def _checked(response: httpx.Response) -> Any:
    """The body; raises `MainJobFailed` with the problem's code and detail."""
    if response.is_success:
        return response.json()
    try:
        problem = response.json()
        reason = f"{problem['code']}: {problem.get('detail') or problem.get('title')}"
    except (ValueError, KeyError, TypeError):
        reason = response.text[:200]
    request = response.request
    raise MainJobFailed(f"{request.method} {request.url.path} answered {response.status_code} {reason}")
