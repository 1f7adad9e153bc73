"""The jobs that exist, in the process that the fleet runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from tests.support.jobs.order_rows import row
from tests.support.jobs.queue import KEYS, QueueHarness
from tests.support.jobs.runners import RunnerFleet
from tests.support.message_signing import worker_answer
from tests.support.receivers.webhooks import receiving
from tests.support.waiting import eventually
from worker_runtime.jobs.config import WebhookOutlet
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol.catalog import (
    DeliverWebhook,
    ExportOrders,
    MakeStatement,
    OrderExport,
    PositionSnapshot,
    SnapshotPositions,
    Statement,
    WebhookReceipt,
    pack_orders,
)
from worker_runtime.jobs.protocol.messages import JobResult, JobStatus
from worker_runtime.process.valkey import Valkey
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.broker_reports import Balance, Position
from worker_runtime.protocol.errors import BerthError, LoginRejected, SessionDown
from worker_runtime.protocol.messages import Answer, Failure, decode
from worker_runtime.protocol.requests import AccountReport, QueryAccount, encode_report, parse_frame


def done(fleet: RunnerFleet, job_id: str, work: msgspec.Struct, **options: Any) -> JobResult:
    reply = fleet.harness.call(job_calls.enqueue(catalog.make_job(job_id, work, **options), KEYS))
    assert reply[0] == "queued"
    return fleet.result(job_id)


def test_a_fleet_delivers_webhooks_again_until_they_are_taken(fleet: RunnerFleet) -> None:
    outlet = WebhookOutlet(keys=(b"k" * 32,), allow_private=True)
    fleet.start(real=True, webhook=outlet, queues=("webhook",))
    with receiving() as receiver:
        receiver.answers = [(503, {}), (200, {})]
        work = DeliverWebhook(
            url=receiver.url, recipient="alice", event="e", body=msgspec.Raw(b'{"a":1}')
        )
        result = done(fleet, "w-1", work, retry_delay=0.05)
    assert result.status is JobStatus.DONE
    assert msgspec.json.decode(result.value, type=WebhookReceipt).status == 200
    assert [headers["Berth-Attempt"] for _, headers, _ in receiver.got] == ["1", "2"]
    assert {headers["Berth-Delivery"] for _, headers, _ in receiver.got} == {"w-1"}


def test_a_runner_without_keys_leaves_webhooks_to_one_that_has_them(fleet: RunnerFleet) -> None:
    keyless = fleet.start("keyless", real=True)
    with receiving() as receiver:
        work = DeliverWebhook(
            url=receiver.url, recipient="alice", event="e", body=msgspec.Raw(b"1")
        )
        fleet.harness.call(job_calls.enqueue(catalog.make_job("w-3", work, retry_delay=1.0), KEYS))
        eventually(lambda: keyless.job_events("job-retry"), "an attempt that finds no keys")
        keyless.send(signal.SIGTERM)
        keyless.wait()
        fleet.start(
            "keyed", real=True, webhook=WebhookOutlet(keys=(b"k" * 32,), allow_private=True)
        )
        assert fleet.result("w-3").status is JobStatus.DONE


def test_a_runner_without_keys_does_not_know_webhooks(fleet: RunnerFleet) -> None:
    fleet.start(real=True)
    work = DeliverWebhook(
        url="https://example.com", recipient="a", event="e", body=msgspec.Raw(b"1")
    )
    result = done(fleet, "w-2", work, attempts=1)
    assert result.failure is not None
    assert result.failure.code == "JOB_UNKNOWN"
    assert "webhooks need BERTH_WEBHOOK_KEY_FILE" in result.failure.detail


def test_statements_and_exports_come_back_as_results(fleet: RunnerFleet) -> None:
    fleet.start(real=True)
    packed = pack_orders([row(1), row(2, side="sell")])
    made = done(fleet, "s-1", MakeStatement(user_id="alice", day="2026-11-20", orders=packed))
    statement = msgspec.json.decode(made.value, type=Statement)
    assert [(line.symbol, line.bought, line.sold) for line in statement.lines] == [("2330", 3, 3)]
    made = done(fleet, "e-1", ExportOrders(user_id="alice", orders=packed))
    export = msgspec.json.decode(made.value, type=OrderExport)
    assert catalog.decompress(export.csv).count(b"\r\n") == 3


def test_orders_that_cannot_be_read_fail_for_good(fleet: RunnerFleet) -> None:
    fleet.start(real=True)
    result = done(fleet, "e-2", ExportOrders(user_id="alice", orders=b"nonsense"))
    assert result.failure is not None
    assert (result.failure.code, result.attempt) == ("MALFORMED_MESSAGE", 1)


@contextmanager
def session(
    harness: QueueHarness, user_id: str, *failures: BerthError
) -> Iterator[list[QueryAccount]]:
    """A user's session that answers questions: first with these failures, then with a report."""
    client = Valkey(harness.url, timeout=10.0)
    client.execute("SET", keys.mark(user_id), "a worker")
    asked: list[QueryAccount] = []
    over = threading.Event()

    def serve() -> None:
        remaining = list(failures)
        while not over.is_set():
            popped = client.execute(
                "BRPOPLPUSH", keys.requests(user_id), keys.processing(user_id), "0.1"
            )
            if popped is None:
                continue
            query: QueryAccount = decode(parse_frame(popped).payload, QueryAccount)
            asked.append(query)
            if remaining:
                answer = Answer(request_id=query.request_id, failure=Failure.of(remaining.pop(0)))
            else:
                report = AccountReport(
                    account_id=query.account_id,
                    taken_at_ms=1_800_000_000_000,
                    complete=True,
                    absence_certain=True,
                    positions=[
                        Position(symbol="2330", quantity=2, average_price=Decimal("1001.5")),
                        Position(symbol="2317", quantity=0, average_price=Decimal(200)),
                    ],
                    balance=Balance(currency="TWD", cash=Decimal(10), available=Decimal(7)),
                )
                answer = Answer(request_id=query.request_id, report=encode_report(report))
            where = keys.answering(user_id, query.request_id)
            client.run(
                scripts.ANSWER, where, [popped, worker_answer(user_id, answer), 60, query.reply_to]
            )

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        over.set()
        thread.join()
        client.close()


@pytest.fixture
def snapshots(fleet: RunnerFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner of the user alice: it has the keys of her messages."""
    monkeypatch.setenv("BERTH_SNAPSHOTS", fleet.harness.url)


@pytest.mark.usefixtures("snapshots")
def test_a_snapshot_asks_the_users_session_until_it_has_a_connection(fleet: RunnerFleet) -> None:
    fleet.harness.client.execute("SET", keys.GENERATION, "g-1")
    fleet.start()
    with session(fleet.harness, "alice", SessionDown()) as asked:
        work = SnapshotPositions(user_id="alice", account_id="main")
        result = done(fleet, "p-1", work, retry_delay=0.05)
    assert (result.status, result.attempt) == (JobStatus.DONE, 2)
    snapshot = msgspec.json.decode(result.value, type=PositionSnapshot)
    assert [(position.symbol, position.quantity) for position in snapshot.positions] == [
        ("2330", 2)
    ]
    assert snapshot.balance is not None
    assert (snapshot.taken_at_ms, int(snapshot.balance.cash)) == (1_800_000_000_000, 10)
    assert {query.generation for query in asked} == {"g-1"}
    assert len({query.request_id for query in asked}) == 2


@pytest.mark.usefixtures("snapshots")
def test_a_snapshot_that_the_session_refuses_for_good_fails_at_once(fleet: RunnerFleet) -> None:
    fleet.start()
    with session(fleet.harness, "alice", LoginRejected("wrong key")):
        result = done(fleet, "p-2", SnapshotPositions(user_id="alice", account_id="main"))
    assert (result.status, result.attempt) == (JobStatus.FAILED, 1)
    assert result.failure is not None
    assert "LOGIN_REJECTED" in result.failure.detail


@pytest.mark.usefixtures("snapshots")
@pytest.mark.parametrize("mark", [False, True])
def test_a_question_that_nobody_took_is_taken_back(fleet: RunnerFleet, mark: bool) -> None:
    client = fleet.harness.client
    if mark:
        client.execute("SET", keys.mark("alice"), "a worker")
    fleet.start()
    work = SnapshotPositions(user_id="alice", account_id="main", patience=0.2)
    result = done(fleet, "p-3", work, attempts=1)
    assert result.failure is not None
    assert (result.failure.code, result.failure.retryable) == ("SESSION_SILENT", True)
    assert client.execute("LLEN", keys.requests("alice")) == 0
