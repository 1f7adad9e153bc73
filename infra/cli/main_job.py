"""The main job: one order of a demo user without a worker, through the REST API to its fill."""

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from infra.cli.users import store_paper_keys
from infra.client.client import BerthClient
from infra.client.errors import ApiError, BerthClientError
from infra.client.models import OrderHistory, OrderTicket
from infra.vault import key_file
from worker_runtime.protocol.errors import BerthError

USER = "demo"
ACCOUNT = f"{USER}-account"
SYMBOL = "2330"
#: Seconds the whole order may take; from a full pool it takes well under one.
ORDER_TIMEOUT_S = 30.0

#: The advice after the order failed: at a switch, and otherwise.
_SWITCHES = (
    "`berth switches` shows every switch; `berth open --all --reason …` (or --user "
    f"{USER}) opens one"
)
_LOOK = (
    f"`berth orders attention --unknown` and `berth worker timeline {USER}` show what became of it"
)


class MainJobFailed(BerthError, code="JOB_FAILED"):
    """The main job did not end with a filled order."""


@dataclass(frozen=True)
class MainJobResult:
    api_key: str = field(repr=False)
    #: With its timeline.
    order: OrderHistory
    #: From sending the request until the answer.
    seconds: float


def run_main_job(api_url: str, exchange_admin_url: str, keys: Path) -> MainJobResult:
    """Runs the job once. `keys` holds `admin.key`,
    and keeps the demo user's key. Raises `MainJobFailed`."""
    try:
        api_key = _ensure_user(api_url, keys)
        with BerthClient(api_url, api_key) as client:
            _stop_worker(client)
            store_paper_keys(client, exchange_admin_url, USER, ACCOUNT)
            order, seconds = _place_order(client)
    except BerthClientError as error:
        at_switch = isinstance(error, ApiError) and error.status == 423
        raise MainJobFailed(f"{error}\n{_SWITCHES if at_switch else _LOOK}") from error
    return MainJobResult(api_key, order, seconds)


def _read_key(path: Path) -> str:
    return key_file.read_key_file(path, private=True).decode().strip()


def _ensure_user(api_url: str, keys: Path) -> str:
    """Returns the demo user's key. A key is shown only once: without the kept one another is
    made."""
    kept = keys / "demo.key"
    if kept.exists():
        api_key = _read_key(kept)
        try:
            with BerthClient(api_url, api_key) as client:
                client.get_worker(USER)
            return api_key
        except (ApiError, ValueError) as error:  # the key is not known any more, or is none
            if isinstance(error, ApiError) and error.status not in (401, 403, 404):
                raise
    with BerthClient(api_url, _read_key(keys / "admin.key")) as admin:
        try:
            api_key = admin.create_user(USER).api_key
        except ApiError as error:
            if error.status != 409:
                raise
            key_request = {"role": "user", "user_id": USER, "label": "another key of the demo"}
            api_key = admin.request("POST", "/api-keys", body=key_request).body["api_key"]
    key_file.write_key_file(kept, f"{api_key}\n".encode(), private=True)
    return api_key


def _stop_worker(client: BerthClient) -> None:
    """Stops the user's worker: after a restart its workflow has claimed a new one already."""
    try:
        client.stop_worker(USER, reason="the demo starts afresh")
    except ApiError as error:
        if error.status in (404, 409):  # there is none
            return
        raise
    deadline = time.monotonic() + ORDER_TIMEOUT_S
    while True:
        seen = client.get_worker(USER)
        if not seen.live and (seen.lifecycle is None or seen.lifecycle.state == "Terminated"):
            return
        if time.monotonic() > deadline:
            raise MainJobFailed(
                f"the worker of {USER} is {seen.state} {ORDER_TIMEOUT_S:.0f} s after its stop"
            )
        time.sleep(0.05)


def _place_order(client: BerthClient) -> tuple[OrderHistory, float]:
    ticket = OrderTicket(
        client_order_id=f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        account_id=ACCOUNT,
        symbol=SYMBOL,
        side="buy",
        quantity=1,
        price_type="MKT",
        time_in_force="IOC",
    )
    started = time.perf_counter()
    answer = client.place_order(USER, ticket, patience=ORDER_TIMEOUT_S)
    seconds = time.perf_counter() - started
    deadline = time.monotonic() + ORDER_TIMEOUT_S
    while True:
        seen = client.get_order(answer.id)
        late = time.monotonic() > deadline
        if seen.final and (late or seen.state in {step.step for step in seen.timeline}):
            break
        if late:
            raise MainJobFailed(
                f"order {answer.id} is still {seen.state} after {ORDER_TIMEOUT_S:.0f} s\n{_LOOK}"
            )
        time.sleep(0.05)  # the recorder writes the events a moment after the answer
    if seen.state != "filled":
        why = f"{seen.code or ''} {seen.reason or ''}".strip()
        raise MainJobFailed(f"order {answer.id} is {seen.state}: {why}\n{_LOOK}")
    return seen, seconds
