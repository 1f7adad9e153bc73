"""Runners that stand still between two steps of theirs, past their lease, and go on with what they
knew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from infra.lab.chaos.jobs.freeze import FreezePlan
from infra.lab.chaos.jobs.runner import ProxiedRunner
from infra.lab.chaos.jobs.steps import RunnerStep
from tests.support.jobs.runners import RunnerFleet, RunnerProcess
from tests.support.jobs.scripted_program import JobScript
from tests.support.waiting import eventually
from worker_runtime.jobs.protocol.messages import JobStatus

#: It ends once others have taken the runner's jobs; the time is more than they need for that.
PLAN = FreezePlan(seconds=90.0, children=False, life=3600.0)


@pytest.fixture
async def proxied(fleet: RunnerFleet, short_directory: Path) -> AsyncIterator[ProxiedRunner]:
    """The line of a runner named `frozen`; another one notices its end, and takes only jobs of
    `other`."""
    parts = urlsplit(fleet.harness.url)
    target = parts.hostname or "", parts.port or 0
    proxied = ProxiedRunner("frozen", short_directory, target, lambda _: None, lambda: None)
    await proxied.open()
    yield proxied
    proxied.close()
    if lines := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(lines, timeout=20)


async def start(fleet: RunnerFleet, proxied: ProxiedRunner) -> RunnerProcess:
    """The runner on the line; to be called before it is armed."""
    runner = await asyncio.to_thread(fleet.start, proxied.name, valkey_url=proxied.url)
    proxied.started(runner.process.pid)
    return runner


@pytest.mark.timeout(120)
async def test_an_end_that_arrives_while_the_job_runs_elsewhere_is_refused(
    fleet: RunnerFleet, proxied: ProxiedRunner
) -> None:
    frozen = await start(fleet, proxied)
    proxied.arm(RunnerStep.END_ASKED, plan=PLAN)
    fleet.add("j", script=JobScript(until=fleet.gate(), returns="x"), idempotent=True)
    old = await asyncio.to_thread(fleet.started, "j")
    fleet.open()
    await asyncio.to_thread(eventually, lambda: proxied.freeze, "the freeze")
    await asyncio.to_thread(Path(fleet.gate()).unlink)
    await asyncio.to_thread(fleet.start, "second")
    new = await asyncio.to_thread(fleet.started, "j", 2)
    await proxied.thaw()
    await asyncio.to_thread(
        eventually, lambda: frozen.logged("job_runner_lost"), "the frozen one to notice"
    )
    assert fleet.harness.result("j") is None
    assert fleet.harness.field("j", "fence") == str(new.fence) != str(old.fence)
    fleet.open()
    result = await asyncio.to_thread(fleet.result, "j")
    assert (result.status, result.attempt) == (JobStatus.DONE, 2)
    assert frozen.job_events("job-completed") == []


@pytest.mark.timeout(120)
async def test_a_job_that_was_reported_as_unknown_does_not_begin_afterwards(
    fleet: RunnerFleet, proxied: ProxiedRunner
) -> None:
    frozen = await start(fleet, proxied)
    await asyncio.to_thread(fleet.start, "second", queues=("other",))
    proxied.arm(RunnerStep.CLAIMED, plan=PLAN)
    fleet.add("j")
    result = await asyncio.to_thread(fleet.result, "j")
    assert result.failure is not None
    assert result.failure.code == "JOB_OUTCOME_UNKNOWN"
    assert fleet.ledger("j") == []  # an operator may look now, and requeue it
    await proxied.thaw()
    await asyncio.to_thread(
        eventually, lambda: frozen.logged("job_runner_lost"), "the frozen one to notice"
    )
    assert fleet.ledger("j") == []
