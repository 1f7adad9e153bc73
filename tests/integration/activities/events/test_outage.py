"""Relay, orchestrator and Temporal away: all that happens meanwhile is reported afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
from temporalio.client import Client

from activities.events.exit_watcher import ExitWatcher
from activities.events.recorder import Recorder
from activities.events.relay import Relay
from activities.events.stream import RECORDER_GROUP, RELAY_GROUP, EventStream
from infra import tasks
from infra.local.servers import TemporalServer
from infra.valkey.client import reply_of
from infra.worker_task import TaskExit
from tests.support.activities import listener
from tests.support.activities.event_streams import wait_until_acknowledged
from tests.support.activities.harness import ActivityHarness
from tests.support.activities.serving_users import start_serving_user
from tests.support.workers.pool_worker import POOL
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import WorkerEvent, WorkerEventKind
from workflows import names


@asynccontextmanager
async def orchestrator(
    harness: ActivityHarness, temporal: Client, name: str
) -> AsyncIterator[None]:
    """The loops that tell, as one process of an orchestrator runs them."""
    relay = EventStream(
        harness.client,
        RELAY_GROUP,
        Relay(temporal),
        harness.secrets,
        consumer=name,
        abandoned_ms=100,
    )
    recorder = EventStream(
        harness.client, RECORDER_GROUP, Recorder(harness.database), harness.secrets, consumer=name
    )
    watch = ExitWatcher(harness.client, harness.database, harness.launcher, temporal, pool=POOL)
    running = [asyncio.create_task(loop()) for loop in (relay.run, recorder.run, watch.run)]
    try:
        yield
    finally:
        await tasks.cancel_tasks(*running)


async def tell(harness: ActivityHarness, user: str, sequence: int) -> None:
    kind = WorkerEventKind.RECONNECTING if sequence % 4 == 0 else WorkerEventKind.CONNECTED
    event = WorkerEvent(
        worker_id="w1",
        user_id=user,
        epoch=1,
        sequence=sequence,
        kind=kind,
        at_ms=1_795_410_000_000 + sequence,
    )
    await harness.send_event(event)


async def until(logs: list[structlog.typing.EventDict], *events: str) -> None:
    while not set(events) <= {str(line["event"]) for line in logs}:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_events_and_ends_of_an_outage_are_all_reported_afterwards(
    harness: ActivityHarness, tmp_path: Path
) -> None:
    talker, _, _ = await start_serving_user(harness)
    dying, first, _ = await start_serving_user(harness)
    doomed, second, _ = await start_serving_user(harness)
    with TemporalServer(tmp_path / "temporal") as server:
        client = await Client.connect(server.address)
        for user in (talker, dying, doomed):
            await listener.start(client, names.user_worker_id(user))
        with structlog.testing.capture_logs() as logs:
            async with orchestrator(harness, client, "one"):
                await tell(harness, talker, 4)
                await wait_until_acknowledged(harness, RELAY_GROUP)
                await asyncio.to_thread(server.stop)
                await tell(harness, talker, 6)
                harness.launcher.end(first.task_id)
                await until(logs, "event_stream_waits", "exit_not_reported")
        # Now no orchestrator runs either. What the first one had taken is still its own.
        assert (await reply_of(harness.client.xpending(keys.CHANGES, RELAY_GROUP)))["pending"] == 1
        for sequence in (8, 10, 12):
            await tell(harness, talker, sequence)
        harness.launcher.end(second.task_id)
        await asyncio.to_thread(server.start)
        async with orchestrator(harness, await Client.connect(server.address), "two"):
            heard = await listener.heard_by(client, names.user_worker_id(talker), 5)
            ends = [
                await listener.heard_by(client, names.user_worker_id(user), 1)
                for user in (dying, doomed)
            ]
    assert sorted(said["sequence"] for _, said in heard) == [4, 6, 8, 10, 12]
    assert [[(name, said["worker_id"]) for name, said in told] for told in ends] == [
        [("worker_lost", first.worker_id)],
        [("worker_lost", second.worker_id)],
    ]


@pytest.mark.parametrize(
    ("reason", "exit_code", "planned"),
    [
        ("stopped", -9, True),
        ("host_restarted", None, True),
        ("host_lost", None, True),
        ("lost", None, True),
        ("exited", 0, True),
        ("exited", 67, True),
        ("exited", 69, True),
        ("exited", 68, False),
        ("killed", -9, False),
        ("oom_killed", -9, False),
    ],
)
async def test_what_a_launcher_says_of_an_end_tells_whether_it_counts_as_a_crash(
    harness: ActivityHarness,
    temporal_server: TemporalServer,
    reason: str,
    exit_code: int | None,
    planned: bool,
) -> None:
    temporal = await Client.connect(temporal_server.address)
    user, worker, ref = await start_serving_user(harness)
    watch = ExitWatcher(harness.client, harness.database, harness.launcher, temporal, pool=POOL)
    async with listener.listening(temporal, names.user_worker_id(user)) as handle:
        await watch.report(
            TaskExit(
                task_id=ref.task_id,
                worker_id=worker.worker_id,
                exit_code=exit_code,
                reason=reason,
                at=1.0,
            )
        )
        [(name, said)] = await listener.signals(handle, 1)
    assert (name, said["reason"], said["planned"]) == ("worker_lost", reason, planned)
