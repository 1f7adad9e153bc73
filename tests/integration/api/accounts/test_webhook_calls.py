"""What came to a webhook is seen, tests place nothing, owners hear of failures, and webhooks can
end."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import func, select, update

from api.http.errors import WebhookSecretWrong
from api.webhook_calls.service import FAILURE_EVENT, FailureNotices
from infra.database.kept_jobs import KeptJob
from infra.database.models import Order, StatementAddress
from infra.database.trading import webhooks
from infra.database.trading.models import Webhook, WebhookCall
from infra.database.trading.signals import MAX_KEPT_REFUSALS, add_refusal
from infra.database.trading.webhook_calls import MAX_SHOWN_STRANGERS
from tests.support.api.orders import set_order_columns
from tests.support.api.pages import csrf_header, logged_in_browser
from tests.support.api.scripted_answers import answer_positions, answer_state, make_position
from tests.support.api.webhooks import (
    await_signal_outcome,
    create_webhook,
    make_signal,
    post_signal,
)
from tests.support.commands import CommandForker
from tests.support.signal_table import rows, wish_of
from tests.support.systems.api import ServedApi, StartWorker, an_order, operator
from tests.support.workers.api_worker import failed
from worker_runtime.protocol.messages import Failure, OrderState


async def ask(
    api: ServedApi, method: str, path: str, key: str | None = None, **how: Any
) -> httpx.Response:
    async with api.client(key or api.key) as user:
        return await user.request(method, f"/users/{api.user}/webhooks{path}", **how)


async def test_calls_show_outcome_reason_orders_and_latency_and_no_secret(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    made = await create_webhook(api)
    placed = await await_signal_outcome(api, made, make_signal(made))
    await post_signal(api, made, make_signal(made, secret="guess" * 8))
    await post_signal(api, made, make_signal(made, action="hold"))
    await post_signal(api, made, b"no JSON")

    answer = await ask(api, "GET", f"/{made['id']}/calls")

    assert answer.status_code == 200, answer.text
    calls = answer.json()["calls"]
    assert [call["outcome"] for call in calls] == [
        "WEBHOOK_SECRET_WRONG",
        "INVALID_REQUEST",
        "WEBHOOK_SECRET_WRONG",
        "placed",
    ]
    assert calls[3]["order_ids"] == [placed.json()["id"]]
    assert (calls[3]["action"], calls[3]["symbol"], calls[3]["quantity"]) == ("buy", "2330", 1)
    assert calls[3]["plan"]["orders"][0]["side"] == "buy"
    assert calls[3]["completed_ms"] >= 0
    assert all(call["answered_ms"] > 0 for call in calls)
    assert "action" in calls[1]["reason"]
    assert made["secret"] not in answer.text
    assert "guessguess" not in answer.text


async def test_calls_come_in_pages_and_the_last_200_are_shown(api: ServedApi) -> None:
    made = await create_webhook(api)
    async with api.services.database.session() as session:
        for _ in range(210):
            session.add(
                WebhookCall(
                    webhook_id=UUID(made["id"]),
                    user_id=api.user,
                    account_id="main",
                    state="refused",
                    outcome="X",
                )
            )
    seen: list[int] = []
    cursor: dict[str, int] = {}
    while True:
        page = (
            await ask(api, "GET", f"/{made['id']}/calls", params={"limit": 90, **cursor})
        ).json()
        seen += [call["id"] for call in page["calls"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert len(seen) == 200
    assert seen == sorted(seen, reverse=True)


async def test_garbage_without_the_secret_sends_no_message_and_hides_no_signal(
    api: ServedApi,
) -> None:
    made = await create_webhook(api)
    own = f'{{"secret": "{made["secret"]}", "action": buy}}'.encode()
    assert (await post_signal(api, made, own)).json()["code"] == "INVALID_REQUEST"
    database = api.services.database
    notices = FailureNotices(database, api.services.kept_jobs, lambda: None)
    assert await notices.send_due()  # the owner's own is reported
    for garbage in (b"", b"no JSON", b"{}", b"x" * 20_000):
        assert (await post_signal(api, made, garbage)).status_code == 403
    async with database.session() as session:
        await session.execute(update(WebhookCall).values(notified_at=None))
        webhook = await session.get_one(Webhook, UUID(made["id"]))
        for _ in range(MAX_KEPT_REFUSALS + 10):
            error = WebhookSecretWrong()
            await add_refusal(session, webhook, error, source="", body="", answered_ms=1)

    listed = (await ask(api, "GET", f"/{made['id']}/calls", params={"limit": 200})).json()["calls"]

    assert [call["outcome"] for call in listed] == [
        *["WEBHOOK_SECRET_WRONG"] * MAX_SHOWN_STRANGERS,
        "INVALID_REQUEST",
    ]
    assert await notices.send_due()
    async with database.session() as session:
        heard = select(WebhookCall.outcome).where(WebhookCall.notified_at.is_not(None))
        assert list(await session.scalars(heard)) == ["INVALID_REQUEST"]


async def test_calls_are_exported_for_spreadsheets_without_formulas(api: ServedApi) -> None:
    made = await create_webhook(api)
    await post_signal(api, made, b'=HYPERLINK("http://x")')
    answer = await ask(api, "GET", f"/{made['id']}/calls.csv", params={"bom": 1})
    assert answer.status_code == 200, answer.text
    assert answer.content.startswith("\ufeff".encode())
    [row] = list(csv.DictReader(io.StringIO(answer.content.decode("utf-8-sig"))))
    assert row["outcome"] == "WEBHOOK_SECRET_WRONG"
    assert row["received_at"].endswith("+08:00")
    assert row["body"].startswith("'=HYPERLINK")


async def test_a_page_shows_the_calls_and_pauses_the_webhook(api: ServedApi) -> None:
    made = await create_webhook(api)
    await post_signal(api, made, make_signal(made, action="hold<script>"))
    async with logged_in_browser(api, api.key) as page:
        user = await page.get(f"/page/users/{api.user}")
        assert f"/page/users/{api.user}/webhooks/{made['id']}" in user.text
        assert f"/v1/users/{api.user}/webhooks/{made['id']}/pause" in user.text
        shown = await page.get(f"/page/users/{api.user}/webhooks/{made['id']}")
    assert shown.status_code == 200
    assert "INVALID_REQUEST" in shown.text
    assert "hold<script>" not in shown.text
    assert made["secret"] not in shown.text


async def test_another_user_sees_nothing_of_a_webhook(api: ServedApi) -> None:
    made = await create_webhook(api)
    other = f"{api.user}-stranger"
    async with api.client(api.admin_key) as admin:
        key = (await admin.post("/users", json={"user_id": other})).json()["api_key"]
    async with api.client(key) as stranger:
        for path in ("calls", "calls.csv"):
            answer = await stranger.get(f"/users/{api.user}/webhooks/{made['id']}/{path}")
            assert answer.status_code == 404
        tested = await stranger.post(
            f"/users/{api.user}/webhooks/{made['id']}/test", json={"signal": {}}
        )
        assert tested.status_code == 404
        own = await stranger.get(f"/users/{other}/webhooks/{made['id']}/calls")
        assert own.status_code == 404


async def test_a_test_shows_the_plan_and_places_nothing(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    worker.reply = answer_positions(make_position("2330", 3))
    made = await create_webhook(api)
    signal = {
        "action": "position",
        "symbol": "TWSE:2330",
        "position_size": "-2",
        "market_position": "short",
    }

    asked = await ask(api, "POST", f"/{made['id']}/test", json={"signal": signal})
    given = await ask(api, "POST", f"/{made['id']}/test", json={"signal": signal, "position": 0})

    assert asked.status_code == 200, asked.text
    plan = asked.json()["plan"]
    assert (asked.json()["symbol"], plan["before"], plan["after"]) == ("2330", 3, -2)
    assert [(order["closes"], order["side"], order["quantity"]) for order in plan["orders"]] == [
        (True, "sell", 3),
        (False, "sell", 2),
    ]
    assert given.json()["plan"]["before"] == 0
    async with api.services.database.session() as session:
        assert await session.scalar(select(func.count()).select_from(Order)) == 0
    assert not [request for request in worker.popped if request.__class__.__name__ == "PlaceOrder"]
    calls = (await ask(api, "GET", f"/{made['id']}/calls")).json()["calls"]
    assert [(call["test"], call["state"]) for call in calls] == [(True, "done"), (True, "done")]


async def test_a_test_of_a_wrong_signal_says_what_is_wrong_and_is_recorded(api: ServedApi) -> None:
    made = await create_webhook(api)
    answer = await ask(
        api, "POST", f"/{made['id']}/test", json={"signal": {"action": "buy", "symbol": "2330"}}
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")
    assert "quantity" in answer.json()["detail"]
    [call] = (await ask(api, "GET", f"/{made['id']}/calls")).json()["calls"]
    assert (call["test"], call["state"], call["outcome"]) == (True, "refused", "INVALID_REQUEST")


@pytest.mark.parametrize(
    ("signal", "code"),
    [
        ({"symbol": "ZZZZ", "quantity": 9000}, "QUANTITY_LIMIT"),
        ({"quantity": 600}, "QUANTITY_LIMIT"),
        ({"action": "close", "position": 10_001}, "CLOSE_INVALID"),
        ({"lot": "fixing"}, ""),
        ({"price_type": "MKP"}, ""),
        ({"lot": "fixing", "price_type": "LMT", "price": "100", "time_in_force": "IOC"}, ""),
    ],
)
async def test_a_test_refuses_what_the_signal_would_be_refused_for(
    api: ServedApi, signal: dict[str, Any], code: str
) -> None:
    made = await create_webhook(api)
    said = {"action": "buy", "symbol": "2330", "quantity": 1, **signal}
    body: dict[str, Any] = {"position": said.pop("position", 0)}
    if said["action"] == "close":
        said.pop("quantity")
    tested = await ask(api, "POST", f"/{made['id']}/test", json=body | {"signal": said})
    assert tested.status_code >= 400, tested.text
    assert not code or tested.json()["code"] == code
    if said["action"] == "buy":
        sent = await await_signal_outcome(api, made, make_signal(made, **said))
        assert sent.json()["code"] == tested.json()["code"]
    test = (await ask(api, "GET", f"/{made['id']}/calls")).json()["calls"][-1]
    assert (test["test"], test["state"]) == (True, "refused")
    assert test["outcome"] == tested.json()["code"]


async def test_a_test_goes_by_switches_and_orders_of_unknown_outcome(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker(api.user, answer_state(OrderState.UNKNOWN))
    made = await create_webhook(api)
    path = f"/{made['id']}/test"
    body = {"signal": {"action": "buy", "symbol": "2330", "quantity": 1}}
    blocked = {"signal": {"action": "buy", "symbol": "2317", "quantity": 1}}
    async with api.client(api.key) as user:
        order = an_order(1, symbol="2317", price="100")
        unknown = (await user.post(f"/users/{api.user}/orders", json=order)).json()
        await set_order_columns(api, unknown["id"], state="unknown")
        assert (await ask(api, "POST", path, json=body)).status_code == 200
        refused = await ask(api, "POST", path, json=blocked)
        assert (refused.json()["code"], unknown["id"] in refused.text) == ("SYMBOL_BLOCKED", True)
        await user.put("/switches", json={"scope": "user", "state": "reducing", "reason": "a test"})
    assert (await ask(api, "POST", path, json=body)).json()["code"] == "REDUCING_ONLY"
    close = {"signal": {"action": "close", "symbol": "2330"}, "position": 3}
    assert (await ask(api, "POST", path, json=close)).status_code == 200


async def test_a_test_of_a_webhook_that_takes_no_signals_is_refused(api: ServedApi) -> None:
    made = await create_webhook(api)
    path, body = f"/{made['id']}/test", {"signal": {"action": "close", "symbol": "2330"}}
    await ask(api, "POST", f"/{made['id']}/pause")
    assert (await ask(api, "POST", path, json=body)).json()["code"] == "WEBHOOK_PAUSED"
    await ask(api, "POST", f"/{made['id']}/resume")
    async with api.services.database.session() as session:  # as if an hour had passed
        past = func.clock_timestamp() - timedelta(seconds=1)
        await session.execute(update(Webhook).values(expires_at=past))
    assert (await ask(api, "POST", path, json=body)).json()["code"] == "WEBHOOK_EXPIRED"
    await ask(api, "DELETE", f"/{made['id']}")
    assert (await ask(api, "POST", path, json=body)).json()["code"] == "WEBHOOK_UNKNOWN"


async def test_a_paused_webhook_refuses_until_it_is_resumed(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    made = await create_webhook(api)
    paused = await ask(api, "POST", f"/{made['id']}/pause")
    assert paused.json()["paused_at"] is not None
    refused = await post_signal(api, made, make_signal(made))
    assert (refused.status_code, refused.json()["code"]) == (409, "WEBHOOK_PAUSED")
    resumed = await ask(api, "POST", f"/{made['id']}/resume")
    assert resumed.json()["paused_at"] is None
    taken = await await_signal_outcome(api, made, make_signal(made, id="2"))
    assert taken.status_code == 201, taken.text


async def test_an_expired_webhook_takes_no_signals(api: ServedApi) -> None:
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    made = await create_webhook(api, expires_at=soon)
    assert datetime.fromisoformat(made["expires_at"]) == datetime.fromisoformat(soon)
    async with api.services.database.session() as session:  # as if the hour had passed
        past = func.clock_timestamp() - timedelta(seconds=1)
        await session.execute(update(Webhook).values(expires_at=past))
    refused = await post_signal(api, made, make_signal(made))
    assert (refused.status_code, refused.json()["code"]) == (410, "WEBHOOK_EXPIRED")
    early = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    answer = await ask(api, "PATCH", f"/{made['id']}", json={"expires_at": early})
    assert answer.status_code == 422


async def test_both_secrets_count_until_the_overlap_of_a_rotation_ends(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    made = await create_webhook(api)
    rotated = (await ask(api, "POST", f"/{made['id']}/rotate", json={"overlap_s": 60})).json()
    assert rotated["secret"] != made["secret"]
    for number, secret in enumerate((made["secret"], rotated["secret"])):
        answer = await await_signal_outcome(
            api, made, make_signal(made, secret=secret, id=str(number))
        )
        assert answer.status_code == 201, answer.text
    at_once = (await ask(api, "POST", f"/{made['id']}/rotate", json={"overlap_s": 0})).json()
    refused = await post_signal(api, made, make_signal(made, secret=rotated["secret"], id="3"))
    assert refused.json()["code"] == "WEBHOOK_SECRET_WRONG"
    taken = await await_signal_outcome(
        api, made, make_signal(made, secret=at_once["secret"], id="4")
    )
    assert taken.status_code == 201


async def test_a_user_has_twenty_webhooks_at_most_and_sees_them_in_pages(api: ServedApi) -> None:
    made = [await create_webhook(api) for _ in range(webhooks.MAX_WEBHOOKS - 1)]
    body = {"account_id": "main", "quantity_unit": "lots"}
    together = await asyncio.gather(*(ask(api, "POST", "", json=body) for _ in range(3)))
    assert sorted(answer.status_code for answer in together) == [201, 409, 409]
    refused = next(answer for answer in together if answer.status_code == 409)
    assert refused.json()["code"] == "WEBHOOK_LIMIT"
    first = (await ask(api, "GET", "", params={"limit": 15})).json()
    rest = (await ask(api, "GET", "", params={"limit": 15, "cursor": first["next_cursor"]})).json()
    seen = [row["id"] for row in first["webhooks"] + rest["webhooks"]]
    assert len(set(seen)) == webhooks.MAX_WEBHOOKS
    assert rest["next_cursor"] is None
    await ask(api, "DELETE", f"/{made[0]['id']}")
    assert (await ask(api, "POST", "", json=body)).status_code == 201


async def test_revoking_a_key_counts_the_webhooks_that_it_made_and_revokes_them_if_asked(
    api: ServedApi,
) -> None:
    made = await create_webhook(api)
    key_id = made["made_by"]
    async with api.client(api.admin_key) as admin:
        kept = await admin.delete(f"/api-keys/{key_id}")
        assert (kept.json()["webhooks_revoked"], kept.json()["webhooks_left"]) == (0, 1)
        revoked = await admin.delete(f"/api-keys/{key_id}", params={"webhooks": True})
        assert (revoked.json()["webhooks_revoked"], revoked.json()["webhooks_left"]) == (1, 0)
    refused = await post_signal(api, made, make_signal(made))
    assert refused.json()["code"] == "WEBHOOK_UNKNOWN"


async def test_an_owner_hears_of_failures_once_and_not_of_strangers(api: ServedApi) -> None:
    made = await create_webhook(api)
    database = api.services.database
    async with database.session() as session:
        session.add(
            StatementAddress(
                user_id=api.user, email="a@example.com", webhook_url="https://example.com/hook"
            )
        )
    notices = FailureNotices(database, api.services.kept_jobs, lambda: None)
    await post_signal(api, made, make_signal(made, secret="guess" * 8))
    assert await notices.send_due() is False
    for number in range(3):
        await post_signal(api, made, make_signal(made, action="hold", id=str(number)))

    sent = [await notices.send_due() for _ in range(2)]

    assert sent == [True, False]
    async with database.session() as session:
        jobs = list(await session.scalars(select(KeptJob.job_id)))
        unheard = (
            select(func.count()).select_from(WebhookCall).where(WebhookCall.notified_at.is_(None))
        )
        assert await session.scalar(unheard) == 1  # the stranger's
    about = [job_id for job_id in jobs if job_id.startswith(f"signals-failed-{made['id']}")]
    assert sorted(job_id.rpartition("-")[2] for job_id in about) == ["mail", "post"]
    assert FAILURE_EVENT == "webhook.signals_failed"
    await post_signal(api, made, make_signal(made, action="hold", id="later"))
    assert await notices.send_due() is False  # it waits for the next message


async def test_a_repeat_gets_its_first_outcome_from_a_webhook_that_is_paused_since(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    made = await create_webhook(api)
    signal = make_signal(made)
    first = await await_signal_outcome(api, made, signal)
    await ask(api, "POST", f"/{made['id']}/pause")
    again = await await_signal_outcome(api, made, signal, new=False)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])


async def test_an_order_that_the_broker_rejects_is_a_failure_that_the_owner_hears_of(
    api: ServedApi, start_worker: StartWorker
) -> None:
    refusal = Failure(code="ORDER_REJECTED", detail="no money")
    await start_worker(api.user, failed(OrderState.REJECTED, refusal))
    made = await create_webhook(api)
    await await_signal_outcome(api, made, make_signal(made))
    [call] = (await ask(api, "GET", f"/{made['id']}/calls")).json()["calls"]
    assert (call["state"], call["outcome"]) == ("done", "rejected")
    assert "no money" in call["reason"]
    assert await FailureNotices(
        api.services.database, api.services.kept_jobs, lambda: None
    ).send_due()


@pytest.mark.timeout(180)
async def test_each_row_of_the_docs_table_is_planned_over_http(api: ServedApi) -> None:
    hooks = {mode: await create_webhook(api, entry_mode=mode) for mode in ("open", "delta")}
    for before, signal, mode, orders, after in rows():
        wish = wish_of(signal)
        body: dict[str, Any] = {
            "action": wish.action.value,
            "symbol": "2330",
            "reduce_only": wish.reduce_only,
        }
        body |= {"quantity": wish.quantity} if wish.quantity is not None else {}
        body |= {"position_size": str(wish.target)} if wish.target is not None else {}
        for each in hooks if mode == "any" else (mode,):
            asked = {"signal": body, "position": int(before)}
            answer = await ask(api, "POST", f"/{hooks[each]['id']}/test", json=asked)
            assert answer.status_code == 200, (signal, answer.text)
            plan = answer.json()["plan"]
            planned = [
                f"{'+' if order['side'] == 'buy' else '-'}{order['quantity']}"
                f"{' (close)' * order['closes']}"
                for order in plan["orders"]
            ]
            shown = ", ".join(planned) or plan["outcome"].replace("_", " ")
            assert shown == orders, (before, signal, each)
            if not wish.is_plain:
                assert plan["after"] == int(after), (before, signal, each)


async def test_operators_name_symbols_on_a_page(api: ServedApi) -> None:
    async with logged_in_browser(api, api.admin_key) as page:
        headers = await csrf_header(page, "/page/symbols")
        set_name = await page.put("/v1/symbols/FITX", json={"symbol": "TXF1!"}, headers=headers)
        assert set_name.status_code == 200, set_name.text
        wrong = await page.put("/v1/symbols/FITX", json={"symbol": "TXF3!"}, headers=headers)
        assert (wrong.status_code, wrong.json()["code"]) == (422, "UNKNOWN_SYMBOL")
        shown = (await page.get("/page/symbols")).text
    assert "FITX" in shown
    assert "TXF1!" in shown
    assert 'data-act="DELETE /v1/symbols/FITX"' in shown
    async with logged_in_browser(api, api.key) as page:
        assert "FITX" not in (await page.get(f"/page/users/{api.user}")).text


async def test_commands_show_try_pause_and_rotate_a_webhook(
    api: ServedApi, commands: CommandForker, tmp_path: Path
) -> None:
    words = (
        "--quantity-unit",
        "lots",
        "--label",
        "my strategy",
        "--expires-at",
        "2100-01-01T00:00:00+08:00",
    )
    async with operator(api, commands, tmp_path) as berth:
        made = await berth("webhooks", "create", api.user, "main", *words, "--json")
        hook = json.loads(made.out)
        signal = '{"action": "close", "symbol": "2330"}'
        tried = await berth("webhooks", "test", api.user, hook["id"], signal, "--position", "2")
        calls = await berth("webhooks", "calls", api.user, hook["id"])
        paused = await berth("webhooks", "pause", api.user, hook["id"])
        resumed = await berth("webhooks", "resume", api.user, hook["id"])
        rotated = await berth("webhooks", "rotate", api.user, hook["id"], "--overlap", "0")
    assert (hook["label"], hook["expires_at"][:4]) == ("my strategy", "2099")
    assert "position 2 -> 0" in tried.out, tried
    assert "close: sell 2" in tried.out
    assert "placed" in calls.out
    assert "is paused" in paused.out
    assert "takes signals again" in resumed.out
    assert "secret" in rotated.out
    assert hook["secret"] not in rotated.out
