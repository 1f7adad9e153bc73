"""Certificates over REST: read when they are stored; an expired one refuses orders at once."""

from __future__ import annotations

import base64
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.database import certificates
from infra.database.models import BrokerAccount
from infra.lab.shioaji.keys import CERTIFICATE_PASSWORD, make_certificate
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, an_order, make_key, operator
from worker_runtime.protocol import errors


async def store(
    user: httpx.AsyncClient, api: ServedApi, certificate: bytes, **changes: Any
) -> httpx.Response:
    body = {
        "broker": "shioaji",
        "simulation": False,
        "api_key": "canary-key",
        "secret_key": "canary-secret",
        "person_id": "A123456789",
        "ca_certificate": base64.b64encode(certificate).decode(),
        "ca_password": CERTIFICATE_PASSWORD,
    }
    return await user.put(f"/users/{api.user}/accounts/live/credentials", json=body | changes)


async def shown(user: httpx.AsyncClient, api: ServedApi) -> dict[str, Any]:
    accounts = (await user.get(f"/users/{api.user}")).json()["accounts"]
    live: dict[str, Any] = next(account for account in accounts if account["account_id"] == "live")
    return live


async def test_the_end_of_a_certificate_is_shown_and_a_bad_one_replaces_nothing(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    stored = await store(user, api, make_certificate(20))
    assert stored.status_code == 200, stored.text
    ends = datetime.fromisoformat(stored.json()["certificate_expires_at"])
    assert timedelta(days=19.9) < ends - datetime.now(UTC) <= timedelta(days=20)
    for certificate, changes, code in (
        (make_certificate(20), {"ca_password": "canary-password"}, "CERTIFICATE_REFUSED"),
        (b"garbage", {}, "CERTIFICATE_REFUSED"),
        (make_certificate(-1), {}, "CERTIFICATE_EXPIRED"),
    ):
        refused = await store(user, api, certificate, **changes)
        assert (refused.status_code, refused.json()["code"]) == (422, code)
        assert "canary" not in refused.text
    kept = await shown(user, api)
    assert (kept["version"], datetime.fromisoformat(kept["certificate_expires_at"])) == (1, ends)


async def test_one_that_we_cannot_read_is_stored_and_its_end_is_not_known(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    await store(user, api, make_certificate(20))
    assert (await store(user, api, b"\x30\x80\0\0")).status_code == 200
    kept = await shown(user, api)
    assert (kept["version"], kept["certificate_expires_at"]) == (2, None)


async def test_of_a_simulation_no_certificate_is_opened(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    stored = await store(user, api, b"garbage", simulation=True)
    assert (stored.status_code, stored.json()["certificate_expires_at"]) == (200, None)


async def test_once_it_has_expired_an_order_is_refused_at_once_until_a_new_one_is_stored(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    """No worker runs: nothing waits for one."""
    await store(user, api, make_certificate(20))
    async with api.services.database.session() as session:
        past = datetime.now(UTC) - timedelta(seconds=1)
        await certificates.set_expiry(session, api.user, "live", past)
    order = an_order(1, account_id="live")
    began = time.monotonic()
    answer = await user.post(f"/users/{api.user}/orders", json=order)
    assert (answer.status_code, answer.json()["code"]) == (422, errors.CertificateExpired.code)
    assert "store it with the credentials" in answer.json()["detail"]
    assert time.monotonic() - began < 5.0
    await store(user, api, make_certificate(20))
    api.services.placer.checks._usage_cache.clear()  # an account is remembered for some seconds
    again = await user.post(f"/users/{api.user}/orders?wait=0", json=an_order(2, account_id="live"))
    assert again.json().get("code") != errors.CertificateExpired.code


async def test_operators_see_which_certificates_expire_and_are_alerted(
    api: ServedApi, user: httpx.AsyncClient, commands: CommandForker, tmp_path: Path
) -> None:
    await store(user, api, make_certificate(20))
    assert (await user.get("/certificates")).status_code == 403
    async with api.client(await make_key(api.settings, "operator")) as staff:
        certificates = (await staff.get("/certificates", params={"limit": 500})).json()[
            "certificates"
        ]
        [row] = [row for row in certificates if row["user_id"] == api.user]
        assert (row["account_id"], row["broker"], row["warned_days"]) == ("live", "shioaji", None)
        sooner = (await staff.get("/certificates", params={"within_days": 7})).json()[
            "certificates"
        ]
        assert api.user not in [row["user_id"] for row in sooner]
        samples = (await staff.get("/metrics")).text.splitlines()
    [sample] = [
        line for line in samples if line.startswith('berth_certificates_expiring{days="30"}')
    ]
    assert float(sample.split()[1]) >= 1
    async with operator(api, commands, tmp_path) as run:
        done = await run("users", "certificates", "--limit", "500")
        assert api.user in done.out


def test_a_report_of_the_same_certificate_changes_nothing() -> None:
    account = BrokerAccount(user_id="u", account_id="a")
    soon = datetime.now(UTC) + timedelta(days=3)
    certificates.note_reported(account, soon)
    assert vars(account)["certificate_expires_at"] == soon
    account.certificate_warned_days = 7
    certificates.note_reported(account, soon + timedelta(hours=8))  # the same, in another zone
    assert (vars(account)["certificate_expires_at"], vars(account)["certificate_warned_days"]) == (
        soon,
        7,
    )
    later = soon + timedelta(days=365)
    certificates.note_reported(account, later)
    assert vars(account)["certificate_expires_at"] == later
    assert vars(account)["certificate_warned_days"] is None


@pytest.mark.parametrize(
    ("days", "due"),
    [(31, None), (29.9, 30), (7.1, 30), (7, 7), (1.5, 7), (0.9, 1), (0, 0), (-400, 0)],
)
def test_each_warning_is_due_from_its_day_on(days: float, due: int | None) -> None:
    now = datetime.now(UTC)
    assert certificates.warning_due(now + timedelta(days=days), now) == due
