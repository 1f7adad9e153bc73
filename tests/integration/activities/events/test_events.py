"""What workers tell, written down once and relayed; and the ends that launchers see."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID

import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from activities.events.recorder import Recorder
from activities.events.stream import BATCH_SIZE, RECORDER_GROUP, RELAY_GROUP, EventStream
from infra.alerts.errors import collector
from infra.database.orders import recording
from infra.database.workers import sessions as worker_sessions
from infra.log import collect_errors
from infra.valkey.client import reply_of
from tests.support.activities.event_streams import (
    EVENT_AT_MS,
    FailingHandler,
    accept_new_order,
    make_order_event,
    make_worker_event,
    run_streams,
    wait_for_events,
    wait_until_acknowledged,
)
from tests.support.activities.harness import ActivityHarness
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BrokerVersionRefused
from worker_runtime.protocol.messages import (
    AccountLogin,
    Event,
    OrderState,
    WorkerEvent,
    WorkerEventKind,
)


async def add(harness: ActivityHarness, *events: Event) -> None:
    for event in events:
        await harness.send_event(event)


async def test_every_event_reaches_the_handler_in_order(harness: ActivityHarness) -> None:
    heard = FailingHandler()
    await add(harness, *(make_worker_event(number) for number in range(1, 201)))
    async with run_streams(EventStream(harness.client, RECORDER_GROUP, heard, harness.secrets)):
        await wait_for_events(heard, 200)
    assert [event.sequence for event in heard.events if isinstance(event, WorkerEvent)] == list(
        range(1, 201)
    )


async def test_a_batch_that_failed_comes_again(harness: ActivityHarness) -> None:
    heard = FailingHandler(failures=1)
    await add(harness, make_worker_event(1), make_worker_event(2))
    async with run_streams(EventStream(harness.client, RECORDER_GROUP, heard, harness.secrets)):
        await wait_for_events(heard, 2)
        await wait_until_acknowledged(harness)
    assert len(heard.events) == 2


async def test_a_malformed_event_is_dropped_and_the_rest_is_read(harness: ActivityHarness) -> None:
    heard = FailingHandler()
    await reply_of(harness.client.xadd(keys.EVENTS, {"e": b"\xff not json"}))
    await reply_of(harness.client.xadd(keys.EVENTS, {"other": b"1"}))
    await add(harness, make_worker_event(1))
    async with run_streams(EventStream(harness.client, RECORDER_GROUP, heard, harness.secrets)):
        await wait_for_events(heard, 1)
        await wait_until_acknowledged(harness)


async def test_what_a_dead_consumer_had_taken_goes_to_another(harness: ActivityHarness) -> None:
    heard = FailingHandler()
    await reply_of(harness.client.xgroup_create(keys.EVENTS, RECORDER_GROUP, id="0", mkstream=True))
    await add(harness, make_worker_event(1))
    await reply_of(harness.client.xreadgroup(RECORDER_GROUP, "dead", {keys.EVENTS: ">"}))
    living = EventStream(
        harness.client, RECORDER_GROUP, heard, harness.secrets, consumer="living", abandoned_ms=0
    )
    async with run_streams(living):
        await wait_for_events(heard, 1)
        await wait_until_acknowledged(harness)


async def test_a_flushed_server_gets_its_group_back_from_the_start(
    harness: ActivityHarness,
) -> None:
    heard = FailingHandler()
    async with run_streams(EventStream(harness.client, RECORDER_GROUP, heard, harness.secrets)):
        await add(harness, make_worker_event(1))
        await wait_for_events(heard, 1)
        await harness.client.flushall()
        await add(harness, make_worker_event(2))
        await wait_for_events(heard, 2)


class KeepingHandler(FailingHandler):
    """Keeps back the events with these sequence numbers."""

    kept: frozenset[int] = frozenset()

    async def handle(self, events: Sequence[Event], received_ms: Sequence[int] = ()) -> list[Event]:
        self.events.extend(events)
        return [
            event
            for event in events
            if isinstance(event, WorkerEvent) and event.sequence in self.kept
        ]


@pytest.mark.parametrize("killed", [False, True], ids=["the same process", "killed meanwhile"])
async def test_what_a_handler_keeps_comes_again_until_it_is_handled(
    harness: ActivityHarness, killed: bool
) -> None:
    first = KeepingHandler()
    first.kept = frozenset({1, BATCH_SIZE + 1})
    await add(harness, *(make_worker_event(number) for number in range(1, BATCH_SIZE + 3)))
    stream = EventStream(
        harness.client, RELAY_GROUP, first, harness.secrets, consumer="one", abandoned_ms=50
    )
    async with run_streams(
        stream
    ):  # kept ones do not hold up the others, and not an end of an outage
        await wait_for_events(first, BATCH_SIZE + 2)
        await add(harness, make_worker_event(BATCH_SIZE + 3))
        await wait_for_events(first, BATCH_SIZE + 3)
    assert (await reply_of(harness.client.xpending(keys.CHANGES, RELAY_GROUP)))["pending"] == 2
    again = first
    if killed:
        again = KeepingHandler()
        stream = EventStream(
            harness.client, RELAY_GROUP, again, harness.secrets, consumer="two", abandoned_ms=50
        )
    again.kept = frozenset()
    again.events.clear()
    async with run_streams(stream):
        await wait_for_events(again, 2)
        await wait_until_acknowledged(harness, RELAY_GROUP)
    assert [event.sequence for event in again.events if isinstance(event, WorkerEvent)] == [
        1,
        BATCH_SIZE + 1,
    ]


async def test_a_stream_is_trimmed_only_below_what_was_handled(harness: ActivityHarness) -> None:
    heard = FailingHandler()
    recorder = EventStream(harness.client, RECORDER_GROUP, heard, harness.secrets)
    await reply_of(harness.client.xgroup_create(keys.EVENTS, RECORDER_GROUP, id="0", mkstream=True))
    await add(harness, *(make_worker_event(number) for number in range(1, 6)))
    await recorder.upkeep()
    assert await reply_of(harness.client.xlen(keys.EVENTS)) == 5
    assert await recorder.step() == 5
    await recorder.upkeep()
    assert (
        await reply_of(harness.client.xlen(keys.EVENTS)) == 1
    )  # the last one read marks the place


async def test_order_events_are_recorded_once_however_often_they_come(
    harness: ActivityHarness,
) -> None:
    order_id = await accept_new_order(harness)
    events = [
        make_order_event(order_id, 1, OrderState.SUBMITTED),
        make_order_event(order_id, 2, OrderState.FILLED, 1),
    ]
    recorder = Recorder(harness.database)
    await recorder.handle(events)
    await recorder.handle([*reversed(events), *events])
    async with harness.database.session() as session:
        order = await recording.get_order(session, UUID(order_id))
        recorded = await recording.events_of_order(session, UUID(order_id))
    assert (order.state, order.filled_quantity) == ("filled", 1)
    assert [event.state for event in recorded if event.state != "accepted"] == [
        "submitted",
        "filled",
    ]


async def test_an_event_of_an_unknown_order_does_not_stop_the_others(
    harness: ActivityHarness,
) -> None:
    known, unknown = await accept_new_order(harness), "00000000-0000-4000-8000-000000000000"
    await Recorder(harness.database).handle(
        [
            make_order_event(unknown, 1, OrderState.FILLED),
            make_order_event(known, 1, OrderState.SUBMITTED),
        ]
    )
    async with harness.database.session() as session:
        assert (await recording.get_order(session, UUID(known))).state == "submitted"


async def test_a_session_that_died_or_cannot_log_in_is_an_error_of_ours(
    harness: ActivityHarness,
) -> None:
    kinds = (WorkerEventKind.RECONNECTING, WorkerEventKind.SESSION_REPLACED, WorkerEventKind.FAILED)
    collector.take()
    with capture_logs(processors=[collect_errors]) as logged:
        await Recorder(harness.database).handle(
            [make_worker_event(n, kind) for n, kind in enumerate(kinds)]
        )
    told = [line["kind"] for line in logged if line["event"] == "worker_failed"]
    assert told == ["session_replaced", "failed"]
    reports = [text for _, text in collector.take()]
    assert len(reports) == 2
    assert all("user_id=u1" in text and "bye" not in text for text in reports), (
        "what it says is its own"
    )


async def test_e_a_refused_version_keeps_its_code_and_alerts_while_workers_run(
    harness: ActivityHarness,
) -> None:
    """Alone, and next to an account of another broker."""
    code = BrokerVersionRefused.code

    def count_failures() -> float:
        return REGISTRY.get_sample_value("berth_claims_failed_total", {"code": code}) or 0

    refused, healthy = AccountLogin(account_id="a1", code=code), AccountLogin(account_id="a2")
    kinds = {WorkerEventKind.DEGRADED: [refused], WorkerEventKind.CONNECTED: [refused, healthy]}
    for number, (kind, logins) in enumerate(kinds.items()):
        collector.take()
        event = replace(make_worker_event(number, kind), logins=logins)
        before = count_failures()
        recorder = Recorder(harness.database)
        with capture_logs(processors=[collect_errors]) as logged:
            await recorder.handle([event, replace(event, worker_id="w2")])
        told = [line for line in logged if line["event"] == "broker_version_refused"]
        assert [line["code"] for line in told] == [code]
        [text] = [text for _, text in collector.take()]
        assert code in text
        counted = count_failures() - before
        assert counted == (2 if kind is WorkerEventKind.DEGRADED else 0)


async def test_a_worker_that_says_again_and_again_that_it_failed_fills_no_log(
    harness: ActivityHarness,
) -> None:
    """A broken one, or one that somebody took over."""
    kinds = (WorkerEventKind.SESSION_REPLACED, WorkerEventKind.FAILED)
    recorder = Recorder(harness.database)
    with capture_logs() as logged:
        for start in range(3):
            events = [make_worker_event(start * 100 + n, kinds[n % 2]) for n in range(100)]
            await recorder.handle([*events, make_worker_event(999, kinds[0], "another")])
    told = [
        (line["worker_id"], line["kind"]) for line in logged if line["event"] == "worker_failed"
    ]
    assert len(told) == len(set(told)) == 3


async def test_connect_and_close_are_written_into_the_assignment(harness: ActivityHarness) -> None:
    user, worker = await harness.user(), await harness.worker()
    await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), worker.serve()
    )
    recorder = Recorder(harness.database)
    await recorder.handle([make_worker_event(1, worker=worker.worker_id)])
    async with harness.database.session() as session:
        row = await worker_sessions.latest_session(
            session, worker_id=worker.worker_id, ended_at=None
        )
    assert row is not None
    assert row.connected_at == datetime.fromtimestamp(EVENT_AT_MS / 1000, UTC)
    await recorder.handle([make_worker_event(2, WorkerEventKind.CLOSED, worker.worker_id)] * 2)
    async with harness.database.session() as session:
        row = await worker_sessions.latest_session(session, worker_id=worker.worker_id)
    assert row is not None
    assert row.end_reason == f"{worker_sessions.CLOSED_BY_WORKER}bye"
