"""no-healthy-kill: whatever happens to Valkey, the launcher or the clocks, no healthy worker is
stopped.

In each story a planted anomaly stands there as well, so that maintenance has something to do, and
is seen to do it when all is quiet again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from temporalio.client import Client

from activities.events.mark_watcher import MarkWatcher
from activities.events.valkey_restorer import ValkeyRestorer
from infra import tasks
from infra.local.servers import ValkeyServer
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.worker_task import Task
from tests.support.activities.harness import ActivityHarness
from tests.support.activities.maintenance import (
    ForgetfulLauncher,
    MaintainedFleet,
    own_line,
    renewing,
)
from tests.support.launchers.fake import FakeLauncher
from tests.support.message_signing import SECRETS
from tests.support.workers.pool_worker import born
from worker_runtime.protocol import keys

SERVING, FREE = 8, 3


async def ready(harness: ActivityHarness, temporal: Client) -> tuple[MaintainedFleet, Task]:
    """A fleet that is well, and a task that should be stopped, seen by one pass."""
    fleet = MaintainedFleet(harness, temporal)
    await fleet.fill(SERVING, FREE)
    await fleet.quiet()
    orphan = await fleet.launched("p-silent")
    scanned, _ = await fleet.run()
    assert (scanned.found, scanned.guarded) == (1, "")
    return fleet, orphan


@asynccontextmanager
async def watched(fleet: MaintainedFleet) -> AsyncIterator[None]:
    """Runs the watcher as well, which puts owner keys back."""
    harness = fleet.harness
    watcher = MarkWatcher(
        harness.client,
        fleet.temporal,
        harness.settings,
        ValkeyRestorer(harness.client, SECRETS),
        interval=0.05,
    )
    task = asyncio.create_task(watcher.run())
    try:
        yield
    finally:
        await tasks.cancel_tasks(task)


@asynccontextmanager
async def own_valkey(harness: ActivityHarness, folder: Path) -> AsyncIterator[ValkeyServer]:
    """A server that may be stopped; the harness is on it."""
    with ValkeyServer(folder / "valkey", durable=False) as server:
        harness.client = valkey.connect_valkey(server.url)
        harness.launcher = FakeLauncher(born(harness.client, harness.keys, harness.made))
        harness.__post_init__()
        try:
            yield server
        finally:
            await harness.client.aclose()


async def until_marked(fleet: MaintainedFleet) -> None:
    """Until the marks and the entries of all are back, by themselves."""
    free = (
        fleet.harness.made.keys()
        - {worker.ref.worker_id for worker in fleet.serving}
        - {"p-silent"}
    )
    expected_keys = [keys.mark(worker.user) for worker in fleet.serving]
    expected_keys += [keys.pool_worker("default", worker) for worker in free]
    while await reply_of(fleet.harness.client.exists(*expected_keys)) < len(expected_keys):  # noqa: ASYNC110 — Valkey has no event
        await asyncio.sleep(0.02)


async def cleans_up_again(fleet: MaintainedFleet, orphan: Task) -> None:
    """Nobody was stopped; two quiet passes later the orphan alone is."""
    assert fleet.harness.launcher.stops == []
    assert len(await fleet.running()) == SERVING + FREE + 1
    for _ in range(4):
        _, outcomes = await fleet.run()
        if outcomes:
            break
    assert outcomes == {"stopped": 1}
    assert [task for task, _ in fleet.harness.launcher.stops] == [orphan.task_id]


async def test_a_flush_under_load_stops_nobody_and_the_marks_come_back(
    harness: ActivityHarness, temporal: Client
) -> None:
    fleet, orphan = await ready(harness, temporal)
    scanned = await fleet.scan()
    assert scanned.confirmed == 1
    await harness.client.flushall()
    # What was confirmed before the flush, too: its cleaning begins after it.
    batch = fleet.batch(scanned)
    assert (await harness.run(fleet.maintenance.clean_up, batch)).outcomes == {"outage": 1}
    assert (await fleet.run())[0].guarded == "the generation is missing"
    async with watched(fleet), renewing(fleet):
        await until_marked(fleet)
        assert (await fleet.run())[0].guarded in (
            "the pass before could not read",
            "the generation has changed",
        )
        await harness.client.flushall()
        await until_marked(fleet)
        await fleet.run()
        await cleans_up_again(fleet, orphan)


async def test_a_valkey_that_comes_back_empty_or_as_it_was_stops_nobody(
    harness: ActivityHarness, temporal: Client, tmp_path: Path
) -> None:
    async with own_valkey(harness, tmp_path) as server:
        fleet, orphan = await ready(harness, temporal)
        await asyncio.to_thread(server.stop)
        assert (await fleet.run())[0].guarded == "Valkey could not be read"
        await asyncio.to_thread(server.start)
        async with watched(fleet), renewing(fleet):
            await until_marked(fleet)
            assert (await fleet.run())[0].guarded == "the pass before could not read"
            await cleans_up_again(fleet, orphan)


async def test_a_valkey_that_was_restarted_between_two_passes_stops_nobody(
    harness: ActivityHarness, temporal: Client, tmp_path: Path
) -> None:
    """With the same generation: its data came back."""
    async with own_valkey(harness, tmp_path) as server:
        fleet, orphan = await ready(harness, temporal)
        generation = await reply_of(harness.client.get(keys.GENERATION))
        await harness.client.aclose()  # its connections: none is found broken later
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        await reply_of(harness.client.set(keys.GENERATION, generation))
        async with watched(fleet), renewing(fleet):
            assert (await fleet.run())[0].guarded == "Valkey was restarted"
            await until_marked(fleet)
            await cleans_up_again(fleet, orphan)


async def test_a_valkey_that_only_maintenance_cannot_reach_stops_nobody(
    harness: ActivityHarness, temporal: Client, valkey_server: ValkeyServer
) -> None:
    fleet, orphan = await ready(harness, temporal)
    async with own_line(valkey_server.port) as (line, client), renewing(fleet):
        fleet.use(client)
        scanned = await fleet.scan()
        assert (scanned.guarded, scanned.confirmed) == ("", 1)
        line.break_off()
        cleaned = await harness.run(fleet.maintenance.clean_up, fleet.batch(scanned))
        assert cleaned.outcomes == {"outage": 1}
        for _ in range(2):
            assert (await fleet.run())[0].guarded == "Valkey could not be read"
        line.cut = False
        assert (await fleet.run())[0].guarded == "the pass before could not read"
        await cleans_up_again(fleet, orphan)


async def test_a_launcher_that_lists_nothing_by_mistake_stops_nobody(
    harness: ActivityHarness, temporal: Client
) -> None:
    harness.launcher = launcher = ForgetfulLauncher(
        born(harness.client, harness.keys, harness.made)
    )
    harness.__post_init__()
    fleet, orphan = await ready(harness, temporal)
    scanned = await fleet.scan()
    launcher.forgets = True
    assert (await harness.run(fleet.maintenance.clean_up, fleet.batch(scanned))).outcomes == {
        "outage": 1
    }
    async with renewing(fleet):
        assert (await fleet.run())[0].guarded == "the launcher lists far fewer tasks"
        # It stays like that: living workers that it does not list show that it is wrong.
        assert (await fleet.run())[0].guarded == "the launcher does not list living workers"
        marks = [
            await reply_of(harness.client.get(keys.mark(worker.user))) for worker in fleet.serving
        ]
        assert None not in marks
        launcher.forgets = False
        await cleans_up_again(fleet, orphan)


async def test_a_launcher_that_does_not_answer_stops_nobody(
    harness: ActivityHarness, temporal: Client
) -> None:
    fleet, orphan = await ready(harness, temporal)
    harness.launcher.unreachable = True
    assert (await fleet.run())[0].guarded == "the launcher could not be read"
    harness.launcher.unreachable = False
    assert (await fleet.run())[0].guarded == "the pass before could not read"
    await cleans_up_again(fleet, orphan)


@pytest.mark.parametrize("step", ["1 day", "-1 day"])
async def test_a_step_of_the_clocks_stops_nobody(
    harness: ActivityHarness, temporal: Client, step: str
) -> None:
    """PostgreSQL's clock steps: all that was written before seems so much older, or to lie in the
    future."""
    fleet, orphan = await ready(harness, temporal)
    fleet.use(harness.client, confirm=600.0)
    await fleet.execute(f"update maintenance_passes set began_at = began_at - interval '{step}'")  # noqa: S608
    await fleet.execute(
        f"update worker_sessions set assigned_at = assigned_at - interval '{step}', "  # noqa: S608
        f"claimed_at = claimed_at - interval '{step}', connected_at = connected_at - interval "
        f"'{step}'"
    )
    # No clock that can be set makes two scans lie further apart than they do.
    assert (await fleet.scan()).number == 0
    fleet.use(harness.client)
    await fleet.run()
    assert {task for task, _ in harness.launcher.stops} <= {orphan.task_id}
    assert len(await fleet.running() - {orphan.task_id}) == SERVING + FREE


async def test_a_person_may_have_it_act_though_much_looks_odd(
    harness: ActivityHarness, temporal: Client
) -> None:
    fleet = MaintainedFleet(harness, temporal)
    await fleet.fill(SERVING, FREE)
    await fleet.quiet()
    orphans = [await fleet.launched(f"p-silent-{number}") for number in range(SERVING)]
    for _ in range(3):
        assert (await fleet.run())[0].guarded == "too many anomalies at once"
    assert harness.launcher.stops == []
    scanned, outcomes = await fleet.run(override=True)
    assert (scanned.guarded, outcomes) == ("", {"stopped": len(orphans)})
    assert {task for task, _ in harness.launcher.stops} == {orphan.task_id for orphan in orphans}


async def test_an_override_finds_an_earlier_pass_though_the_last_one_was_a_moment_ago(
    harness: ActivityHarness, temporal: Client
) -> None:
    fleet = MaintainedFleet(harness, temporal)
    await fleet.fill(SERVING, FREE)
    await fleet.quiet()
    orphans = [await fleet.launched(f"p-silent-{number}") for number in range(SERVING)]
    await fleet.run()
    fleet.use(harness.client, confirm=0.5)
    # No pass is old enough, and so none has seen them.
    assert (await fleet.run(override=True))[1] == {}
    await asyncio.sleep(0.6)
    assert (await fleet.run(override=True))[1] == {"stopped": len(orphans)}
