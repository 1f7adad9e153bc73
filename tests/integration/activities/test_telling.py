"""Ends and events reach the workflows concerned, on a real Temporal server."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.common import RawValue
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.exit_watch import ExitWatch
from activities.relay import Relay
from activities.slot import ask
from infra import tasks
from infra.database import worker_sessions
from infra.local.servers import TemporalServer
from tests.integration.activities.conftest import Yard
from tests.integration.activities.scripted import POOL, ScriptedWorker
from worker_runtime.board import Board
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import WorkerEvent, WorkerEventKind
from workflows import names

QUEUE = f"listeners-{os.getpid()}"


@workflow.defn
class Listener:
    """Stands in for a user's or a pool's workflow and keeps every signal."""

    def __init__(self) -> None:
        self._heard: list[tuple[str, dict[str, Any]]] = []

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.signal(dynamic=True)
    def hear(self, name: str, args: Sequence[RawValue]) -> None:
        self._heard.append((name, workflow.payload_converter().from_payload(args[0].payload, dict)))

    @workflow.query
    def heard(self) -> list[tuple[str, dict[str, Any]]]:
        return self._heard


@pytest.fixture
async def temporal(temporal_server: TemporalServer) -> Client:
    return await Client.connect(temporal_server.address)


@asynccontextmanager
async def listening(client: Client, workflow_id: str) -> AsyncIterator[WorkflowHandle[Listener, None]]:
    async with Worker(
        client, task_queue=QUEUE, workflows=[Listener], workflow_runner=UnsandboxedWorkflowRunner()
    ):
        handle = await client.start_workflow(Listener.run, id=workflow_id, task_queue=QUEUE)
        try:
            yield handle
        finally:
            await handle.terminate()


async def signals(handle: WorkflowHandle[Listener, None], count: int) -> list[tuple[str, dict[str, Any]]]:
    while len(heard := await handle.query(Listener.heard)) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return heard


async def user_with_worker(yard: Yard, name: str) -> tuple[str, ScriptedWorker]:
    worker = await yard.worker(f"p-{name}-{os.getpid()}")
    user = await yard.user()
    await asyncio.gather(yard.run(yard.claiming.claim_worker, yard.claim(user)), worker.serve())
    return user, worker


def watch(yard: Yard, temporal: Client) -> ExitWatch:
    return ExitWatch(yard.client, yard.database, yard.launcher, temporal, pool=POOL)


async def test_the_end_of_a_users_worker_reaches_that_users_workflow(yard: Yard, temporal: Client) -> None:
    user, worker = await user_with_worker(yard, "users")
    async with listening(temporal, names.user_worker_id(user)) as handle:
        task = asyncio.create_task(watch(yard, temporal).run())
        yard.launcher.end(worker.task_id, -9, "killed")
        heard = await signals(handle, 1)
        await tasks.end(task)
    assert heard[0][0] == "worker_lost"
    assert (heard[0][1]["worker_id"], heard[0][1]["exit_code"]) == (worker.worker_id, -9)


async def test_the_end_of_a_free_worker_reaches_its_pool_and_nobody_can_claim_it(
    yard: Yard, temporal: Client
) -> None:
    worker = await yard.worker()
    async with listening(temporal, names.worker_pool_id(POOL)) as handle:
        task = asyncio.create_task(watch(yard, temporal).run())
        yard.launcher.end(worker.task_id)
        heard = await signals(handle, 1)
        await tasks.end(task)
    assert heard == [("worker_gone", {"worker_id": worker.worker_id})]
    assert not await ask(yard.client.exists(keys.pool_ready(POOL), keys.pool_worker(POOL, worker.worker_id)))


async def test_an_end_that_the_workflow_ordered_is_not_told_again(yard: Yard, temporal: Client) -> None:
    user, worker = await user_with_worker(yard, "ordered")
    async with yard.database.session() as session:
        await worker_sessions.end(session, claim_id="c1", reason="idle")
    async with listening(temporal, names.user_worker_id(user)) as handle:
        yard.launcher.end(worker.task_id)
        async for ended in yard.launcher.exits():
            await watch(yard, temporal).tell(ended)
            break
        assert await handle.query(Listener.heard) == []


async def test_an_end_without_a_workflow_is_no_error(yard: Yard, temporal: Client) -> None:
    _, worker = await user_with_worker(yard, "alone")
    yard.launcher.end(worker.task_id)
    async for ended in yard.launcher.exits():
        await watch(yard, temporal).tell(ended)
        break
    assert not await ask(yard.client.exists(keys.pool_worker(POOL, worker.worker_id)))


async def test_only_events_that_a_workflow_acts_on_are_relayed(yard: Yard, temporal: Client) -> None:
    user = f"relay-{os.getpid()}"
    board = Board()  # numbers the events, as it does in a worker

    def event(sequence: int, kind: WorkerEventKind) -> WorkerEvent:
        return WorkerEvent(
            worker_id="w1", user_id=user, epoch=1, sequence=sequence, kind=kind, at_ms=1000 * sequence
        )

    async with listening(temporal, names.user_worker_id(user)) as handle:
        await Relay(temporal).handle(
            [
                event(board.next_session_event(), WorkerEventKind.CONNECTED),
                event(board.next_session_event(), WorkerEventKind.RECONNECTING),
                event(board.next_session_event(), WorkerEventKind.CONNECTED),
                event(board.next_session_event(), WorkerEventKind.DEGRADED),
                event(board.next_supervisor_event(), WorkerEventKind.OWNER_MISSING),
                event(board.next_session_event(), WorkerEventKind.CLOSED),
            ]
        )
        heard = await signals(handle, 3)
    assert [(name, said["kind"], said["sequence"]) for name, said in heard] == [
        ("worker_event", "reconnecting", 4),
        ("worker_event", "connected", 6),
        ("worker_event", "owner_missing", 9),
    ]


async def test_an_event_of_a_user_without_a_workflow_does_not_hold_up_the_next(temporal: Client) -> None:
    user = f"relay-late-{os.getpid()}"
    async with listening(temporal, names.user_worker_id(user)) as handle:
        await Relay(temporal).handle(
            [
                WorkerEvent(
                    worker_id="w1",
                    user_id=name,
                    epoch=1,
                    sequence=2,
                    kind=WorkerEventKind.RECONNECTING,
                    at_ms=1,
                )
                for name in ("nobody-at-all", user)
            ]
        )
        assert len(await signals(handle, 1)) == 1
