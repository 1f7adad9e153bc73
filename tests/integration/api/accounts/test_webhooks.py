"""Webhooks over the API: each signal once, from whom it may come, and nothing secret told."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import insert, select, update

from api.webhooks.schemas import Signal
from infra.database.models import AuditEntry
from infra.database.trading.models import Webhook, WebhookCall, WebhookDelivery
from infra.database.trading.webhooks import MAX_WEBHOOKS
from infra.doctor import checks as doctor
from infra.doctor.servers import run_check
from tests.support.api.accounts import put_account
from tests.support.api.orders import start_worker_holding, submitted_orders
from tests.support.api.pages import logged_in_browser
from tests.support.api.scripted_answers import answer_positions, make_position
from tests.support.api.webhooks import (
    await_signal_outcome,
    create_webhook,
    make_signal,
    post_signal,
)
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, StartWorker, operator, running_api
from tests.support.waiting import until
from tests.support.workers.api_worker import filled, silent


async def test_a_signal_that_postgresql_cannot_keep_is_refused(api: ServedApi) -> None:
    made = await create_webhook(api)
    answer = await post_signal(api, made, make_signal(made, id="a\0b"))
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")


async def test_a_signal_becomes_one_order_however_often_it_comes(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    made = await create_webhook(api)
    signal = make_signal(made)
    first = await await_signal_outcome(
        api, made, signal, headers={"content-type": "text/plain; charset=utf-8"}
    )
    assert (first.status_code, first.json()["state"]) == (201, "filled"), first.text
    again = await asyncio.gather(
        *(await_signal_outcome(api, made, signal, new=False) for _ in range(5))
    )
    assert {(answer.status_code, answer.json()["id"]) for answer in again} == {
        (200, first.json()["id"])
    }
    assert len(worker.popped) == 1
    other = await await_signal_outcome(api, made, make_signal(made, id="2"))
    assert other.status_code == 201
    async with api.services.database.session() as session:
        calls = list(await session.scalars(select(WebhookCall)))
    assert {str(order_id) for call in calls for order_id in call.order_ids} == {
        first.json()["id"],
        other.json()["id"],
    }


async def test_equal_alerts_at_once_are_one_order(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    made = await create_webhook(api)
    signal = make_signal(made)
    answers = await asyncio.gather(*(await_signal_outcome(api, made, signal) for _ in range(8)))
    assert {answer.json()["id"] for answer in answers} == {answers[0].json()["id"]}
    assert len(worker.popped) == 1


async def test_a_signal_of_another_time_is_refused_unless_it_was_taken_then(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    made = await create_webhook(api, window_s=60)
    for seconds in (-61, 3600):  # time passes until it is looked at
        at = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
        answer = await post_signal(api, made, make_signal(made, time=at))
        assert (answer.status_code, answer.json()["code"]) == (422, "ALERT_OUTDATED")
    signal = make_signal(made, time=(datetime.now(UTC) - timedelta(seconds=30)).isoformat())
    first = await await_signal_outcome(api, made, signal)
    assert first.status_code == 201
    async with api.services.database.session() as session:  # as if much time had passed
        row = await session.get(Webhook, made["id"])
        assert row is not None
        row.window_s = 1
    later = await await_signal_outcome(api, made, signal, new=False)
    assert (later.status_code, later.json()["id"]) == (200, first.json()["id"])


async def test_anyone_who_may_not_post_hears_so(api: ServedApi) -> None:
    made = await create_webhook(api, sources=["52.89.214.238", "10.1.0.0/16"])
    assert made["sources"] == ["52.89.214.238/32", "10.1.0.0/16"]
    refused = await post_signal(api, made, make_signal(made))
    assert (refused.status_code, refused.json()["code"]) == (403, "SOURCE_NOT_ALLOWED")
    invented = await post_signal(
        api, made, make_signal(made), headers={"x-forwarded-for": "52.89.214.238"}
    )
    assert invented.json()["code"] == "SOURCE_NOT_ALLOWED"
    changed = api.settings.model_copy(update={"trusted_proxies": ("127.0.0.1",)})
    async with running_api(changed) as proxied:
        through = {"x-forwarded-for": "10.1.2.3"}
        wrong = await post_signal(proxied, made, make_signal(made, secret="guess"), headers=through)
        assert (wrong.status_code, wrong.json()["code"]) == (403, "WEBHOOK_SECRET_WRONG")
    unknown = await post_signal(api, {"token": "guess"}, make_signal(made))
    assert (unknown.status_code, unknown.json()["code"]) == (404, "WEBHOOK_UNKNOWN")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'"secret": "%s", not json', "INVALID_REQUEST"),
        (b'["secret: %s"]', "INVALID_REQUEST"),
        (b"secret=%s \xff\xfe", "INVALID_REQUEST"),
        (b"secret=%s" + b"[" * 10_000, "INVALID_REQUEST"),
        (b'{"secret": "%s"}', "INVALID_REQUEST"),
        (b'{"Secret": "%s", "action": "buy"}', "INVALID_REQUEST"),
        (b'{"secret": "guess", "id": {"secret": "%s"}}', "INVALID_REQUEST"),
        (b"secret=%s" + b"x" * 17_000, "WEBHOOK_SECRET_WRONG"),
        (b"secret=%s " + b"x" * 17_000, "BODY_TOO_LARGE"),
    ],
)
async def test_garbage_of_its_owner_is_a_clear_problem(
    api: ServedApi, body: bytes, code: str
) -> None:
    made = await create_webhook(api)
    answer = await post_signal(api, made, body.replace(b"%s", made["secret"].encode()))
    assert answer.json()["code"] == code
    assert answer.headers["content-type"] == "application/problem+json"
    assert made["token"] not in answer.text
    assert made["secret"] not in answer.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b"\xff\xfe",
        b"[" * 10_000,
        b'{"secret": "canary-secret"}',
        b'{"secret": "\\ud800"}',
        b'{"action": "buy", "symbol": "2330", "quantity": 1}',
        b"x" * 17_000,
    ],
)
async def test_garbage_without_the_secret_is_refused_for_that(api: ServedApi, body: bytes) -> None:
    made = await create_webhook(api)
    answer = await post_signal(api, made, body)
    assert (answer.status_code, answer.json()["code"]) == (403, "WEBHOOK_SECRET_WRONG")
    assert "canary-secret" not in answer.text


@pytest.mark.parametrize(
    "changes",
    [
        {"quantity": "1.5"},
        {"quantity": -1},
        {"action": "hold"},
        {"symbol": "a b"},
        {"time": "yesterday"},
        {"time": 1e300},
        {"price_type": "LMT"},
        {"price_type": "LMT", "price": "NaN"},
    ],
)
async def test_each_field_of_a_signal_is_looked_at(api: ServedApi, changes: dict[str, Any]) -> None:
    made = await create_webhook(api)
    answer = await post_signal(api, made, make_signal(made, **changes))
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")
    assert made["secret"] not in answer.text


async def test_a_webhook_has_a_rate_of_its_own(api: ServedApi, start_worker: StartWorker) -> None:
    changed = api.settings.model_copy(update={"webhook_rate": 3})
    async with running_api(changed) as slow:
        await start_worker(slow.user)
        made, other = await create_webhook(slow), await create_webhook(slow)
        codes = [
            (await post_signal(slow, made, make_signal(made, id=f"{n}"))).json().get("code")
            for n in range(8)
        ]
        assert codes[:3] == [None] * 3
        assert "WEBHOOK_BUSY" in codes[3:]  # a new minute may have begun in between
        assert (await post_signal(slow, other, b"")).json()["code"] == "WEBHOOK_SECRET_WRONG"


@pytest.mark.parametrize("sent", ["a wrong secret", "no signal"])
async def test_a_flood_by_a_leaked_token_does_not_silence_its_owner(
    api: ServedApi, start_worker: StartWorker, sent: str
) -> None:
    changed = api.settings.model_copy(update={"webhook_rate": 3})
    async with running_api(changed) as slow:
        await start_worker(slow.user)
        made = await create_webhook(slow)
        forged = make_signal(made, secret="guess") if sent == "a wrong secret" else b"{}"
        codes = [(await post_signal(slow, made, forged)).json()["code"] for _ in range(8)]
        assert codes[0] != "WEBHOOK_BUSY"
        assert "WEBHOOK_BUSY" in codes[3:]
        answer = await await_signal_outcome(slow, made, make_signal(made))
        assert (answer.status_code, answer.json()["state"]) == (201, "filled"), answer.text


async def test_a_revoked_webhook_takes_nothing_and_is_still_listed(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    made = await create_webhook(api)
    gone = await user.delete(f"/users/{api.user}/webhooks/{made['id']}")
    again = await user.delete(f"/users/{api.user}/webhooks/{made['id']}")
    assert gone.json() == again.json()
    assert (await post_signal(api, made, make_signal(made))).json()["code"] == "WEBHOOK_UNKNOWN"
    (row,) = (await user.get(f"/users/{api.user}/webhooks")).json()["webhooks"]
    assert row["revoked_at"] == gone.json()["revoked_at"]
    assert not {"token", "secret"} & set(row)
    async with api.services.database.session() as session:
        actions = list(await session.scalars(select(AuditEntry.action).order_by(AuditEntry.id)))
        told = list(await session.scalars(select(AuditEntry.data)))
    assert [action for action in actions if action.startswith("webhook")] == [
        "webhook.created",
        "webhook.revoked",
    ]
    assert made["token"] not in str(told)
    assert made["secret"] not in str(told)
    stranger = await user.delete(f"/users/{api.user}/webhooks/{'0' * 32}")
    assert stranger.json()["code"] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", "", {"label": "again"}),
        ("POST", "/pause", None),
        ("POST", "/resume", None),
        ("POST", "/rotate", {}),
    ],
)
async def test_nothing_changes_a_revoked_webhook(
    api: ServedApi, user: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None
) -> None:
    made = await create_webhook(api)
    address = f"/users/{api.user}/webhooks/{made['id']}"
    await user.delete(address)
    answer = await user.request(method, f"{address}{path}", json=body)
    assert (answer.status_code, answer.json()["code"]) == (404, "WEBHOOK_UNKNOWN")
    assert "revoked" in answer.json()["detail"]


async def test_an_expiry_is_taken_away_by_null_and_stays_when_left_out(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    made = await create_webhook(api)
    address = f"/users/{api.user}/webhooks/{made['id']}"
    ends = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert (await user.patch(address, json={"expires_at": ends})).json()["expires_at"]
    assert (await user.patch(address, json={"label": "x"})).json()["expires_at"]
    assert (await user.patch(address, json={"expires_at": None})).json()["expires_at"] is None
    assert (await user.patch(address, json={})).status_code == 422


async def test_the_audit_trail_has_a_webhooks_expiry(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    ends = datetime(2100, 1, 1, tzinfo=UTC)
    made = await create_webhook(api, expires_at=ends.isoformat())
    later = (ends + timedelta(days=1)).isoformat()
    await user.patch(f"/users/{api.user}/webhooks/{made['id']}", json={"expires_at": later})
    async with api.services.database.session() as session:
        subject = f"webhook:{made['id']}"
        rows = select(AuditEntry.data).where(AuditEntry.subject == subject).order_by(AuditEntry.id)
        told = [data["expires_at"] for data in await session.scalars(rows)]
    assert told == [ends.isoformat(), later]
    assert made["secret"] not in str(told)


async def test_an_expired_webhook_counts_again_once_it_is_given_a_later_end(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    made = await create_webhook(api)
    async with api.services.database.session() as session:
        await session.execute(
            update(Webhook)
            .where(Webhook.id == UUID(made["id"]))
            .values(expires_at=datetime.now(UTC))
        )
    for _ in range(MAX_WEBHOOKS):
        await create_webhook(api)
    address = f"/users/{api.user}/webhooks/{made['id']}"
    refused = await user.patch(address, json={"expires_at": None})
    assert (refused.status_code, refused.json()["code"]) == (409, "WEBHOOK_LIMIT")


async def test_a_command_lists_all_webhooks_not_the_first_page_only(
    api: ServedApi, commands: CommandForker, tmp_path: Path
) -> None:
    made = [await create_webhook(api) for _ in range(3)]
    # As if 120 more had been made and revoked.
    async with api.services.database.session() as session:
        await session.execute(
            insert(Webhook),
            [
                {
                    "id": uuid4(),
                    "token_hash": uuid4().hex,
                    "secret_hash": "",
                    "user_id": api.user,
                    "account_id": "main",
                    "created_at": datetime.now(UTC) - timedelta(days=1),
                    "revoked_at": datetime.now(UTC),
                }
                for _ in range(120)
            ],
        )
    async with operator(api, commands, tmp_path) as berth:
        listed = json.loads((await berth("webhooks", "list", api.user, "--json")).out)
        assert len(listed) == 123
        assert {hook["id"] for hook in made} == {row["id"] for row in listed[:3]}
        first_page = await berth("webhooks", "list", api.user, "--limit", "2")
        assert "there are more" in first_page.out
        change = ("webhooks", "change", api.user, made[0]["id"])
        ended = await berth(*change, "--expires-at", "2099-12-31T13:30:00+08:00", "--json")
        assert json.loads(ended.out)["expires_at"]
        assert json.loads((await berth(*change, "--no-expiry", "--json")).out)["expires_at"] is None


async def test_a_webhook_for_futures_counts_contracts_and_one_for_stocks_waits_to_be_confirmed(
    api: ServedApi, user: httpx.AsyncClient, commands: CommandForker, tmp_path: Path
) -> None:
    await put_account(api, "futures", "paper", "futures")
    address = f"/users/{api.user}/webhooks"
    refused = await user.post(address, json={"account_id": "futures", "quantity_unit": "lots"})
    assert (refused.status_code, refused.json()["code"]) == (422, "INVALID_REQUEST")
    futures = (await user.post(address, json={"account_id": "futures"})).json()
    assert (futures["quantity_unit"], futures["unit"]) == (None, "contracts")
    stocks = await create_webhook(api)
    async with api.services.database.session() as session:  # as one of an earlier release
        row = await session.get_one(Webhook, UUID(stocks["id"]))
        row.quantity_unit = None
    listed = (await user.get(address)).json()["webhooks"]
    assert [(row["id"], row["unit"]) for row in listed] == [
        (stocks["id"], None),
        (futures["id"], "contracts"),
    ]
    async with logged_in_browser(api, api.key) as page:
        shown = (await page.get(f"/page/users/{api.user}")).text
    assert "for futures: contracts" in shown
    assert shown.count("unit unconfirmed") == 1
    async with operator(api, commands, tmp_path) as berth:
        text = (await berth("webhooks", "list", api.user)).out
    for hook, unit in ((stocks, "unconfirmed"), (futures, "contracts")):
        (line,) = [line for line in text.splitlines() if hook["id"] in line]
        assert unit in line
    result = await run_check(doctor.WEBHOOKS, api.settings)
    assert result.problem.startswith("1 webhooks count lots")
    confirmed = await user.patch(f"{address}/{stocks['id']}", json={"quantity_unit": "shares"})
    assert (confirmed.json()["quantity_unit"], confirmed.json()["unit"]) == ("shares", "shares")
    assert not (await run_check(doctor.WEBHOOKS, api.settings)).problem


async def test_a_webhook_is_made_by_its_user_for_an_account_that_is_there(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    wrong = await user.post(
        f"/users/{api.user}/webhooks", json={"account_id": "nobodys", "quantity_unit": "lots"}
    )
    assert wrong.json()["code"] == "ACCOUNT_NOT_FOUND"
    other = await user.post(
        "/users/somebody/webhooks", json={"account_id": "main", "quantity_unit": "lots"}
    )
    assert other.json()["code"] == "NOT_FOUND"
    bad = {"account_id": "main", "quantity_unit": "lots", "sources": ["nowhere"]}
    assert (await user.post(f"/users/{api.user}/webhooks", json=bad)).json()[
        "code"
    ] == "INVALID_REQUEST"


async def test_checks_and_switches_hold_for_alerts_too(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    made = await create_webhook(api)
    large = await await_signal_outcome(api, made, make_signal(made, quantity=500))
    assert large.json()["code"] == "QUANTITY_LIMIT"
    await user.put("/switches", json={"scope": "user", "state": "halted", "reason": "a test"})
    assert (await await_signal_outcome(api, made, make_signal(made))).json()[
        "code"
    ] == "TRADING_HALTED"


async def test_what_was_refused_stays_refused_and_what_never_was_an_order_is_not_one_later(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    made = await create_webhook(api)
    signal = make_signal(made)
    await user.put("/switches", json={"scope": "user", "state": "halted", "reason": "a test"})
    first = await await_signal_outcome(api, made, signal)
    await user.put("/switches", json={"scope": "user", "state": "open", "reason": "a test"})
    again = await post_signal(api, made, signal)
    assert [answer.json()["code"] for answer in (first, again)] == ["TRADING_HALTED"] * 2
    assert first.json()["detail"] == again.json()["detail"]
    # Taken, and then this process died: it may come again, but not at any time.
    late = make_signal(
        made, id="late", time=(datetime.now(UTC) - timedelta(seconds=90)).isoformat()
    )
    webhook = Webhook(id=UUID(made["id"]), user_id=api.user, account_id="main")
    async with api.services.database.session() as session:
        digest = Signal.model_validate(late).digest(webhook)
        session.add(WebhookDelivery(webhook_id=webhook.id, digest=digest, alert={}))
    assert (await post_signal(api, made, late)).json()["code"] == "ALERT_OUTDATED"
    assert worker.popped == []


async def test_an_entry_closes_the_other_side_first_and_a_repeat_does_nothing(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -2)
    made = await create_webhook(api)
    signal = make_signal(made, action="long_entry", symbol="MXFA6", quantity=3)
    answer = await await_signal_outcome(api, made, signal)
    body = answer.json()
    assert (answer.status_code, body["action"], body["complete"]) == (201, "long_entry", True), body
    assert [(leg["side"], leg["quantity"], leg["state"]) for leg in body["legs"]] == [
        ("buy", 2, "filled"),
        ("buy", 3, "filled"),
    ]
    again = await await_signal_outcome(api, made, signal, new=False)
    assert (again.status_code, again.json()["legs"]) == (200, body["legs"])
    assert submitted_orders(worker) == [("buy", 2, True), ("buy", 3, False)]


async def test_an_entry_continues_after_its_answer_because_nobody_repeats_a_signal(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -2, silent)
    made = await create_webhook(api)
    signal = make_signal(made, action="long_entry", symbol="MXFA6", quantity=3)
    answer = await post_signal(api, made, signal)
    assert (answer.status_code, answer.json()["complete"]) == (202, False)
    await until(lambda: len(worker.popped) == 1)
    again = await post_signal(
        api, made, signal
    )  # the first answer may have come before there was a leg
    assert (again.status_code, again.json()["complete"]) == (202, False)
    assert [leg["reduce_only"] for leg in again.json()["legs"]] == [True]
    worker.script = filled
    await worker.answer_later(filled(worker.popped[0]))
    await until(lambda: len(worker.popped) == 2)
    assert submitted_orders(worker) == [("buy", 2, True), ("buy", 3, False)]


@pytest.mark.parametrize(
    ("held", "signal", "expected"),
    [
        (3, {"action": "close"}, ("sell", 3)),
        (-3, {"action": "close", "quantity": 1}, ("buy", 1)),
        (3, {"action": "long_exit"}, ("sell", 3)),
        (3, {"action": "sell", "quantity": 2, "reduce_only": True}, ("sell", 2)),
    ],
)
async def test_a_close_goes_by_the_brokers_position(
    api: ServedApi,
    start_worker: StartWorker,
    held: int,
    signal: dict[str, Any],
    expected: tuple[str, int],
) -> None:
    worker = await start_worker_holding(api, start_worker, held)
    made = await create_webhook(api)
    answer = await await_signal_outcome(
        api, made, make_signal(made, **{"quantity": None, "symbol": "MXFA6", **signal})
    )
    assert answer.status_code == 201, answer.text
    assert submitted_orders(worker) == [(*expected, True)]


@pytest.mark.parametrize(
    "signal",
    [
        {"action": "short_exit"},
        {"action": "short_exit", "quantity": 2},
        {"action": "buy", "quantity": 1, "reduce_only": True},
    ],
)
async def test_what_only_reduces_opens_nothing_also_when_it_comes_again(
    api: ServedApi, start_worker: StartWorker, signal: dict[str, Any]
) -> None:
    worker = await start_worker_holding(api, start_worker, 3)
    made = await create_webhook(api)
    said = make_signal(made, **{"quantity": None, "symbol": "MXFA6", **signal})
    first = await await_signal_outcome(api, made, said)
    body = first.json()
    assert (first.status_code, body["outcome"], body["legs"]) == (201, "nothing_to_close", [])
    assert body["reason"] == "there is no short position to close"
    worker.reply = answer_positions(make_position("MXFA6", -3))
    again = await post_signal(api, made, said)
    assert (again.status_code, again.json()) == (200, body)
    assert worker.popped == []


async def test_nothing_secret_is_logged(
    api: ServedApi, start_worker: StartWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    await start_worker(api.user)
    made = await create_webhook(api)
    await post_signal(api, made, make_signal(made))
    await post_signal(api, made, make_signal(made, secret="canary-guess"))
    await post_signal(api, made, b"canary-garbage")
    logged = "".join(capsys.readouterr())
    assert "/v1/webhooks/…" in logged
    for secret in (made["token"], made["secret"], "canary-guess", "canary-garbage"):
        assert secret not in logged
