"""The main job: one order of a demo user without a worker, through the REST API to its fill."""

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from infra.client.client import AsyncBerthClient
from infra.client.errors import ApiError, BerthClientError
from infra.client.models import BrokerCredentials, OrderHistory, OrderTicket
from infra.exchange.client import ExchangeAdmin
from infra.vault import key_file
from worker_runtime.protocol.errors import BerthError

USER = "demo"
SYMBOL = "2330"
#: Seconds the whole order may take; from a full pool it takes well under one.
PATIENCE = 30.0

#: What helps when the order failed: at a switch, and otherwise.
_SWITCHES = f"`berth switches` shows every switch; `berth open --all --reason …` (or --user {USER}) opens one"
_LOOK = f"`berth orders attention --unknown` and `berth worker timeline {USER}` show what became of it"


class MainJobFailed(BerthError, code="JOB_FAILED"):
    """The main job did not end with a filled order."""


@dataclass(frozen=True)
class MainJobResult:
    user_id: str
    api_key: str = field(repr=False)
    #: With its timeline.
    order: OrderHistory
    #: From sending the request until the answer.
    seconds: float


def run_main_job(api_url: str, exchange_admin_url: str, keys: Path) -> MainJobResult:
    """Runs the job once. `keys` holds `admin.key`, and keeps the demo user's key. Raises `MainJobFailed`."""
    try:
        return asyncio.run(_run_main_job(api_url, exchange_admin_url, keys))
    except BerthClientError as error:
        at_switch = isinstance(error, ApiError) and error.status == 423
        raise MainJobFailed(f"{error}\n{_SWITCHES if at_switch else _LOOK}") from error


async def _run_main_job(api_url: str, exchange_admin_url: str, keys: Path) -> MainJobResult:
    api_key = await _ensure_user(api_url, keys)
    async with AsyncBerthClient(api_url, api_key) as client:
        await _stop_worker(client, USER)
        await _store_credentials(client, USER, exchange_admin_url)
        order, seconds = await _place_order(client, USER)
    return MainJobResult(USER, api_key, order, seconds)


def _read_key(path: Path) -> str:
    return key_file.read_key_file(path, private=True).decode().strip()


async def _ensure_user(api_url: str, keys: Path) -> str:
    """The demo user's key. A key is shown only once: without the kept one another is made."""
    kept = keys / "demo.key"
    if kept.exists():
        api_key = _read_key(kept)
        try:
            async with AsyncBerthClient(api_url, api_key) as client:
                await client.get_worker(USER)
            return api_key
        except (ApiError, ValueError) as error:  # the key is not known any more, or is none
            if isinstance(error, ApiError) and error.status not in (401, 403, 404):
                raise
    async with AsyncBerthClient(api_url, _read_key(keys / "admin.key")) as admin:
        try:
            api_key = (await admin.create_user(USER)).api_key
        except ApiError as error:
            if error.status != 409:
                raise
            wanted = {"role": "user", "user_id": USER, "label": "another key of the demo"}
            api_key = (await admin.request("POST", "/api-keys", body=wanted)).body["api_key"]
    key_file.write_key_file(kept, f"{api_key}\n".encode(), private=True)
    return api_key


async def _stop_worker(client: AsyncBerthClient, user_id: str) -> None:
    """Stops the user's worker: after a restart its workflow has claimed a new one already."""
    try:
        await client.stop_worker(user_id, reason="the demo starts afresh")
    except ApiError as error:
        if error.status in (404, 409):  # there is none
            return
        raise
    deadline = time.monotonic() + PATIENCE
    while True:
        seen = await client.get_worker(user_id)
        if not seen.live and (seen.lifecycle is None or seen.lifecycle.state == "Terminated"):
            return
        if time.monotonic() > deadline:
            raise MainJobFailed(f"the worker of {user_id} is {seen.state} {PATIENCE:.0f} s after its stop")
        await asyncio.sleep(0.05)


async def _store_credentials(client: AsyncBerthClient, user_id: str, exchange_admin_url: str) -> None:
    """Makes new keys at the exchange and stores them in the vault, so that no clear secret is kept."""
    made = BrokerCredentials(
        broker="paper", api_key=secrets.token_urlsafe(16), secret_key=secrets.token_urlsafe(32)
    )
    account = f"{user_id}-account"
    async with ExchangeAdmin(exchange_admin_url) as exchange:
        await exchange.register(account, made.api_key, made.secret_key)
    await client.store_credentials(user_id, account, made)


async def _place_order(client: AsyncBerthClient, user_id: str) -> tuple[OrderHistory, float]:
    ticket = OrderTicket(
        client_order_id=f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        account_id=f"{user_id}-account",
        symbol=SYMBOL,
        side="buy",
        quantity=1,
        price_type="MKT",
        time_in_force="IOC",
    )
    started = time.perf_counter()
    answer = await client.place_order(user_id, ticket, patience=PATIENCE)
    seconds = time.perf_counter() - started
    deadline = time.monotonic() + PATIENCE
    while True:
        seen = await client.get_order(answer.id)
        late = time.monotonic() > deadline
        if seen.final and (late or seen.state in {step.step for step in seen.timeline}):
            break
        if late:
            raise MainJobFailed(f"order {answer.id} is still {seen.state} after {PATIENCE:.0f} s\n{_LOOK}")
        await asyncio.sleep(0.05)  # the recorder writes the events a moment after the answer
    if seen.state != "filled":
        why = f"{seen.code or ''} {seen.reason or ''}".strip()
        raise MainJobFailed(f"order {answer.id} is {seen.state}: {why}\n{_LOOK}")
    return seen, seconds
