"""What an attacker can have recorded by events: nothing without the key of an assignment.

A hostile worker has one. It can report nothing of anybody else, and of its own user only while it
may.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from prometheus_client import REGISTRY
from sqlalchemy import select, text
from structlog.testing import capture_logs

from activities.events.recorder import LATE_NEWS, Recorder
from activities.events.stream import GROUPS, KEY_TIMEOUT_S, RECORDER_GROUP, EventStream
from infra.database.dead_letters import DeadLetterRow, DeadLetters
from infra.database.orders import changes, recording
from infra.database.orders.changes import OrderChange
from infra.database.trading import reconciliations
from infra.database.workers import sessions as worker_sessions
from infra.valkey.client import reply_of
from infra.vault.message_secret import MessageSecretFile, MessageSecrets
from infra.vault.secret_versions import add_version, create_versions, load_versions, new_version
from tests.support.activities.event_streams import (
    FailingHandler,
    accept_new_order,
    load_order,
    make_fill_event,
    run_streams,
    wait_for_events,
    wait_until_acknowledged,
)
from tests.support.activities.harness import ActivityHarness
from tests.support.databases import assign_launched_worker
from worker_runtime.protocol import keys
from worker_runtime.protocol.broker_reports import Position
from worker_runtime.protocol.messages import (
    AccountReported,
    OrderState,
    WorkerEvent,
    WorkerEventKind,
    encode,
)
from worker_runtime.protocol.requests import AccountReport, encode_report
from worker_runtime.protocol.worker_reports import EVENT, sign_event


async def orders_of_two(harness: ActivityHarness) -> tuple[str, str, str]:
    """The attacker, the attacker's order, and the victim's."""
    attacker = await harness.user()
    own = await accept_new_order(harness, attacker)
    return attacker, own, await accept_new_order(harness, await harness.user())


async def end_assignment(harness: ActivityHarness, user_id: str, ago: timedelta) -> None:
    """Gives the user an assignment, epoch 1, which ended so long ago."""
    async with harness.database.session() as session:
        await worker_sessions.assign_epoch(
            session, user_id=user_id, claim_id=f"c-{user_id}", pool="default"
        )
        await session.execute(
            text(
                "update worker_sessions set ended_at = clock_timestamp() - cast(:ago as interval) "
                "where user_id = :user"
            ),
            {"ago": ago, "user": user_id},
        )


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with a change"])
async def test_a_fill_of_another_users_order_is_not_recorded(
    harness: ActivityHarness, alone: bool
) -> None:
    attacker, own, victims = await orders_of_two(harness)
    terms: dict[str, Any] = {} if alone else {"quantity": 1, "price": Decimal(9)}
    await Recorder(harness.database).handle(
        [
            make_fill_event(attacker, victims),
            make_fill_event(attacker, own, state=OrderState.SUBMITTED, **terms),
        ]
    )
    assert (
        (await load_order(harness, victims)).state,
        (await load_order(harness, victims)).filled_quantity,
    ) == (
        "accepted",
        0,
    )
    # Its own it may report: it is the broker's voice.
    assert (await load_order(harness, own)).filled_quantity == 1


@pytest.mark.parametrize("days", [None, 2], ids=["another's", "long gone"])
async def test_nobody_confirms_a_change_of_an_order_who_may_not_report_it(
    harness: ActivityHarness, days: int | None
) -> None:
    """Another user's worker, or the user's own that ended long ago; not even among events that
    count."""
    attacker, _, victims = await orders_of_two(harness)
    victim = (await load_order(harness, victims)).user_id
    change = OrderChange(
        quantity=None,
        price=Decimal(9),
        generation="g",
        deadline_at=datetime.now(UTC) + timedelta(minutes=1),
    )
    async with harness.database.session() as session:
        changed = await recording.get_order(session, UUID(victims))
        assert await changes.note_change(session, changed, "r1", change, actor="test") is None
    forged = make_fill_event(
        attacker, victims, state=OrderState.SUBMITTED, quantity=1, price=Decimal(9)
    )
    if days is not None:
        await end_assignment(harness, victim, timedelta(days=days))
        forged = msgspec.structs.replace(forged, user_id=victim)
    genuine = make_fill_event(victim, victims, "submitted", epoch=2, state=OrderState.SUBMITTED)
    await Recorder(harness.database).handle([forged, genuine])
    recorded = await load_order(harness, victims)
    assert (recorded.state, recorded.price) == ("submitted", None)
    shows = make_fill_event(victim, victims, "changed", epoch=2, quantity=1, price=Decimal(9))
    await Recorder(harness.database).handle([forged, shows])
    assert (await load_order(harness, victims)).price == 9


async def test_the_id_of_another_orders_event_cannot_be_used_up(harness: ActivityHarness) -> None:
    """An event's id is taken once. Under the victim's, but for the attacker's order, it would hide
    a fill."""
    attacker, own, victims = await orders_of_two(harness)
    stolen = make_fill_event(attacker, own, event_id=f"{victims}:filled")
    recorder = Recorder(harness.database)
    await recorder.handle([stolen])
    await recorder.handle([make_fill_event((await load_order(harness, victims)).user_id, victims)])
    assert (await load_order(harness, victims)).state == "filled"


@pytest.mark.parametrize("days", [0.9, 1.1])
async def test_late_news_of_a_former_worker_count_for_a_day_and_then_go_to_a_person(
    harness: ActivityHarness, days: float
) -> None:
    user = await harness.user()
    order_id = await accept_new_order(harness, user)
    await end_assignment(harness, user, timedelta(days=days))
    for number in range(3):
        await Recorder(harness.database).handle(
            [make_fill_event(user, order_id, f"filled{number}")]
        )
    recorded = await load_order(harness, order_id)
    if days < 1:
        assert (recorded.state, recorded.attention) == ("filled", None)
        return
    assert (recorded.state, recorded.filled_quantity) == ("accepted", 0)
    assert (recorded.attention or "").startswith(LATE_NEWS)
    async with harness.database.session() as session:
        steps = [step.state for step in await recording.events_of_order(session, UUID(order_id))]
    assert steps.count("needs_attention") == 1
    async with harness.database.session() as session:
        letters = (await session.scalars(select(DeadLetterRow))).all()
    assert [(letter.kind, letter.source, letter.count) for letter in letters] == [
        ("late", f"{user}:1", 1)
    ] * 3
    assert all('"filled_quantity":1' in letter.text for letter in letters)


async def test_an_outage_of_ours_makes_no_fill_late(harness: ActivityHarness) -> None:
    """Lateness is counted until Valkey has the event, and not until somebody reads it."""
    user = await harness.user()
    order_id = await accept_new_order(harness, user)
    await end_assignment(harness, user, timedelta(days=3))
    entry = sign_event(make_fill_event(user, order_id), harness.secrets.assignment_keys(user, 1))
    sent_ms = int((time.time() - timedelta(days=2.5).total_seconds()) * 1000)
    await reply_of(harness.client.xadd(keys.EVENTS, {EVENT: entry}, id=f"{sent_ms}-0"))
    async with run_streams(
        EventStream(harness.client, RECORDER_GROUP, Recorder(harness.database), harness.secrets)
    ):
        await wait_until_acknowledged(harness)
    recorded = await load_order(harness, order_id)
    assert (recorded.state, recorded.filled_quantity, recorded.attention) == ("filled", 1, None)


async def test_a_repeat_of_what_was_recorded_in_time_is_not_late(harness: ActivityHarness) -> None:
    user = await harness.user()
    order_id = await accept_new_order(harness, user)
    submitted = make_fill_event(user, order_id, "submitted", state=OrderState.SUBMITTED)
    await Recorder(harness.database).handle([submitted])
    await end_assignment(harness, user, timedelta(days=3))
    await Recorder(harness.database).handle([submitted])
    assert (await load_order(harness, order_id)).attention is None
    async with harness.database.session() as session:
        assert (await session.scalars(select(DeadLetterRow))).all() == []


async def test_a_worker_that_is_long_gone_cannot_make_the_books_differ(
    harness: ActivityHarness,
) -> None:
    user = await harness.user()
    await end_assignment(harness, user, timedelta(days=2))
    position = Position(symbol="2330", quantity=5, average_price=Decimal(1))
    for number in (1, 2):  # the first comparison begins the books
        report = AccountReport(
            account_id="main",
            taken_at_ms=number,
            complete=True,
            absence_certain=True,
            positions_agree=True,
            positions=[msgspec.structs.replace(position, quantity=5 * number)],
        )
        reported = AccountReported(
            worker_id="w",
            user_id=user,
            account_id="main",
            epoch=1,
            at_ms=number,
            report=encode_report(report),
        )
        await Recorder(harness.database, differences_block=True).handle([reported])
    async with harness.database.session() as session:
        known = await reconciliations.earlier_comparisons(session, user, "main")
    assert not known.begun
    assert not known.open


async def test_a_worker_cannot_end_an_assignment_in_anothers_name(harness: ActivityHarness) -> None:
    victim, attacker = await harness.user(), await harness.user()
    async with harness.database.session() as session:
        await worker_sessions.assign_epoch(session, user_id=victim, claim_id="c1", pool="default")
        await assign_launched_worker(session, "c1", "w1")
    closed = WorkerEvent(
        worker_id="w1",
        user_id=attacker,
        epoch=1,
        sequence=2,
        kind=WorkerEventKind.CLOSED,
        at_ms=1_795_410_000_000,
    )
    await Recorder(harness.database).handle([closed])
    async with harness.database.session() as session:
        assert (
            await worker_sessions.latest_session(session, worker_id="w1", ended_at=None) is not None
        )


@pytest.mark.parametrize("group", GROUPS)
async def test_an_event_without_the_assignments_key_reaches_no_handler(
    harness: ActivityHarness, group: str
) -> None:
    """Forged without a key, with one of another secret, user or epoch; and a genuine one that was
    altered."""
    refused = ("berth_messages_refused_total", {"kind": "event"})
    before = REGISTRY.get_sample_value(*refused) or 0
    victim, order_id = await harness.user(), str(UUID(int=1))
    genuine = make_fill_event(victim, order_id)
    own = sign_event(
        make_fill_event("attacker", order_id), harness.secrets.assignment_keys("attacker", 1)
    )
    later = harness.secrets.assignment_keys(victim, 2)
    heard = FailingHandler()
    stream = EventStream(harness.client, group, heard, harness.secrets)
    await harness.send_event(genuine, MessageSecrets([new_version(1)]))
    mac = own.partition(b" ")[0]
    for entry in (
        b" " + encode(genuine),
        mac + b" " + encode(genuine),
        mac + b" " + encode(make_fill_event("attacker", order_id, filled_quantity=9)),
        sign_event(genuine, later),
        encode(genuine),
    ):
        await reply_of(harness.client.xadd(GROUPS[group], {EVENT: entry}))
    await harness.send_event(genuine)
    async with run_streams(stream):
        await wait_for_events(heard, 1)
        await wait_until_acknowledged(harness, group)
    assert heard.events == [genuine]
    assert stream.refused.count == 6
    assert (REGISTRY.get_sample_value(*refused) or 0) - before == 6


async def test_many_forged_events_are_counted_and_logged_once_for_each_user_and_epoch(
    harness: ActivityHarness,
) -> None:
    user, heard = await harness.user(), FailingHandler()
    event, strangers = make_fill_event(user, str(UUID(int=1))), MessageSecrets([new_version(1)])
    for _ in range(20):
        await harness.send_event(event, strangers)
        await harness.send_event(msgspec.structs.replace(event, epoch=2), strangers)
    await harness.send_event(event)
    stream = EventStream(harness.client, RECORDER_GROUP, heard, harness.secrets)
    with capture_logs() as logs:
        async with run_streams(stream):
            await wait_for_events(heard, 1)
    assert stream.refused.count == 40
    assert [line["of"] for line in logs if line["event"] == "event_not_authentic"] == [
        f"event of user {user}, epoch {epoch}" for epoch in (1, 2)
    ]


async def test_an_event_under_a_rotated_secret_waits_until_the_reader_has_it(
    harness: ActivityHarness, tmp_path: Path
) -> None:
    """The file was replaced on the worker's side first."""
    create_versions(tmp_path / "here.key")
    shutil.copy(tmp_path / "here.key", tmp_path / "there.key")
    add_version(tmp_path / "there.key", keep=2)
    newest = MessageSecrets(load_versions(tmp_path / "there.key")[:1])
    user, heard = await harness.user(), FailingHandler()
    event = make_fill_event(user, str(UUID(int=1)))
    await harness.send_event(event, newest)
    stream = EventStream(
        harness.client, RECORDER_GROUP, heard, MessageSecretFile(tmp_path / "here.key")
    )
    async with run_streams(stream):
        await asyncio.sleep(0.5)
        assert heard.events == []
        os.replace(tmp_path / "there.key", tmp_path / "here.key")
        await wait_for_events(heard, 1)
    assert (heard.events, stream.refused.count) == ([event], 0)


async def test_made_up_versions_of_the_secret_delay_once_and_leave_a_letter_for_each_assignment(
    harness: ActivityHarness,
) -> None:
    user, heard = await harness.user(), FailingHandler()
    event = make_fill_event(user, str(UUID(int=1)))
    for number in range(100, 130):
        secret = msgspec.structs.replace(new_version(1), version=number)
        forged = msgspec.structs.replace(event, epoch=1 + number % 2)
        await harness.send_event(forged, MessageSecrets([secret]))
    await harness.send_event(event)
    stream = EventStream(
        harness.client,
        RECORDER_GROUP,
        heard,
        harness.secrets,
        dead_letters=DeadLetters(harness.database),
    )
    began = time.monotonic()
    async with run_streams(stream):
        await wait_for_events(heard, 1)
        await wait_until_acknowledged(harness)
    assert KEY_TIMEOUT_S <= time.monotonic() - began < 2 * KEY_TIMEOUT_S
    async with harness.database.session() as session:
        letters = (await session.scalars(select(DeadLetterRow))).all()
    assert [(letter.source, letter.user_id, letter.count) for letter in letters] == [
        ("newer key", "", 15)
    ] * 2
