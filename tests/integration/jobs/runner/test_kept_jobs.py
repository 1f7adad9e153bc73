"""Accepted jobs survive a flushed Valkey: each ends once, whatever it was doing, and whoever is
killed."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import func, select, text

from infra.database.dead_letters import DeadLetterRow
from infra.database.engine import Database
from infra.database.kept_jobs import KeptJob, keep_settings
from infra.database.models import AuditEntry
from infra.jobs.client import JobClient, JobIdReused
from infra.jobs.kept import KeptJobs
from infra.local.process import free_port
from infra.valkey.client import connect_valkey, reply_of
from infra.vault.message_secret import MessageSecrets
from infra.vault.secret_versions import SecretVersion
from tests.support.jobs.keeper import JobKeeper, job_keeper
from tests.support.jobs.runners import ROOT, RunnerFleet, RunnerProcess
from tests.support.jobs.scripted_program import JobScript
from tests.support.message_signing import SECRETS, VERSION
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.protocol import keys


@pytest.fixture
async def keeper(fleet: RunnerFleet, migrated_database: str) -> AsyncIterator[JobKeeper]:
    async with job_keeper(migrated_database, fleet.harness.url) as made:
        yield made


@pytest.mark.timeout(90)
async def test_a_flush_ends_fifty_accepted_jobs_once_each_and_runs_none_twice_that_must_not(
    keeper: JobKeeper, fleet: RunnerFleet
) -> None:
    ledger = str(fleet.ledger_path)
    done = [f"done{number}" for number in range(15)]
    running = [f"running{number}" for number in range(10)]
    queued = [f"queued{number}" for number in range(25)]
    await asyncio.to_thread(fleet.start, slots=10)
    for number, job_id in enumerate(done):
        assert await keeper.add(job_id, JobScript(ledger=ledger), idempotent=bool(number % 2))
    await keeper.until(dict.fromkeys(done, "done"))
    for number, job_id in enumerate(running):
        script = JobScript(ledger=ledger, until=fleet.gate())
        await keeper.add(job_id, script, idempotent=bool(number % 2), timeout=30.0)
    for job_id in running:
        await asyncio.to_thread(fleet.started, job_id)
    for number, job_id in enumerate(queued):
        await keeper.add(job_id, JobScript(ledger=ledger), idempotent=bool(number % 2), timeout=5.0)

    await keeper.client.flushall()
    fleet.open()
    expected: dict[str, str | None] = dict.fromkeys(done + queued, "done")
    for job_id in done + running + queued:
        assert not await keeper.add(job_id), "its id counts after a flush, too"
    for job_id in running[::2]:  # their runner says what became of them, or that nobody knows
        await asyncio.to_thread(fleet.result, job_id)
    async with asyncio.timeout(60):
        while None in (outcomes := await keeper.outcomes()).values():
            await keeper.sweep()
            await asyncio.sleep(0.05)
    assert {job_id: outcomes[job_id] for job_id in expected} == expected
    starts = Counter(start.job_id for start in fleet.ledger())
    assert {job_id: starts[job_id] for job_id in done + queued} == dict.fromkeys(done + queued, 1)
    for number, job_id in enumerate(running):
        if number % 2:
            assert outcomes[job_id] == "done"
            assert starts[job_id] <= 2
        else:
            assert outcomes[job_id] in ("done", "failed")
            assert starts[job_id] == 1
    async with keeper.database.session() as session:
        letters = [letter.subject for letter in await session.scalars(select(DeadLetterRow))]
    assert sorted(letters) == sorted(
        job_id for job_id, outcome in outcomes.items() if outcome == "failed"
    )


async def test_a_run_that_ended_after_the_flush_counts_and_does_not_run_again(
    keeper: JobKeeper, fleet: RunnerFleet
) -> None:
    """Its runner has not noticed the flush when the job ends."""
    await asyncio.to_thread(fleet.start, lease=30.0)
    script = JobScript(ledger=str(fleet.ledger_path), until=fleet.gate())
    await keeper.add("mail", script, idempotent=False)
    await asyncio.to_thread(fleet.started, "mail")
    await keeper.client.flushall()
    await keeper.sweep()
    assert (await keeper.rows())["mail"].missing
    fleet.open()
    assert (await asyncio.to_thread(fleet.result, "mail")).status == "done"
    await keeper.until({"mail": "done"})
    assert len(fleet.ledger("mail")) == 1


async def test_two_sweepers_enqueue_each_lost_job_once_in_its_order(
    keeper: JobKeeper, migrated_database: str, fleet: RunnerFleet
) -> None:
    names = [f"j{number:02}" for number in range(50)]
    for name in names:
        await keeper.add(name)
    await keeper.client.flushall()
    async with job_keeper(migrated_database, fleet.harness.url) as other:
        await asyncio.gather(keeper.sweep(), other.sweep(), keeper.sweep())
        assert sorted(await keeper.queued()) == names
        await keeper.client.flushall()
        await keeper.sweep()
        assert await keeper.queued() == names


@pytest.mark.timeout(60)
async def test_what_a_killed_sweeper_left_the_next_one_does(
    keeper: JobKeeper, migrated_database: str, fleet: RunnerFleet
) -> None:
    names = [f"j{number:03}" for number in range(200)]
    for name in names:
        await keeper.add(name)
    await keeper.client.flushall()
    async with keeper.database.session() as session:
        await session.execute(text("update kept_jobs set check_at = now()"))
    words = (
        sys.executable,
        "-m",
        "tests.support.jobs.keeper",
        migrated_database,
        fleet.harness.url,
    )
    process = await asyncio.create_subprocess_exec(*words, cwd=ROOT)
    try:
        async with asyncio.timeout(40):
            while not await keeper.queued():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    finally:
        process.kill()
        await process.wait()
    assert 0 < len(await keeper.queued()) < 200, "it was killed at its work"
    await keeper.sweep()
    assert await keeper.queued() == names


async def test_a_delayed_job_keeps_its_time_and_one_in_valkey_is_left_alone(
    keeper: JobKeeper,
) -> None:
    await keeper.add("later", delay=3600.0)
    await keeper.client.flushall()
    async with keeper.database.session() as session:
        await session.execute(
            text("update kept_jobs set created_at = now() - interval '1800 seconds'")
        )
    await keeper.sweep()
    state = await keeper.jobs.queue.get("later")
    assert state is not None
    assert state.due_at_ms is not None
    assert state.queued_at_ms is not None
    assert 1700 < (state.due_at_ms - state.queued_at_ms) / 1000 < 1800
    await keeper.sweep()
    assert await keeper.jobs.queue.get("later") == state


async def test_an_end_is_noted_as_soon_as_it_is_heard(
    keeper: JobKeeper, fleet: RunnerFleet
) -> None:
    await asyncio.to_thread(fleet.start)
    await keeper.add("j")
    await asyncio.to_thread(fleet.result, "j")
    await keeper.sweeper.mark_ended_jobs_due()
    assert await keeper.sweeper.sweep() == 1
    row = (await keeper.rows())["j"]
    assert (row.outcome, row.sealed, row.check_at) == ("done", b"", None)
    await keeper.sweeper.mark_ended_jobs_due(block=1)  # a repeat, and what is not kept
    assert await keeper.sweeper.sweep() == 0


async def test_a_failure_is_listed_once_reported_to_its_producer_and_can_be_redriven_after_a_flush(
    keeper: JobKeeper, fleet: RunnerFleet
) -> None:
    await asyncio.to_thread(fleet.start)
    job_id = "statement-mail.2026-11-20.ann"
    script = JobScript(ledger=str(fleet.ledger_path), fails="no such address")
    await keeper.add(job_id, script)
    await keeper.until({job_id: "failed"})
    await keeper.sweep()
    await keeper.client.flushall()
    await keeper.sweep()
    async with keeper.database.session() as session:
        [letter] = list(await session.scalars(select(DeadLetterRow)))
        [told] = list(await session.scalars(select(AuditEntry)))
    assert (letter.kind, letter.subject, letter.count, letter.closed_at) == ("job", job_id, 1, None)
    assert letter.reason.startswith("JOB_FAILED: ")
    assert (told.action, told.subject) == ("statement.failed", "user:ann")
    assert (told.data["day"], told.data["code"]) == ("2026-11-20", "JOB_FAILED")

    assert await keeper.jobs.change(job_id, "", outcome=None, missing=True, check_at=func.now())
    await keeper.sweep()
    await asyncio.to_thread(fleet.started, job_id, 2)
    await keeper.until({job_id: "failed"})
    assert len(fleet.ledger(job_id)) == 2


async def test_a_users_lost_job_wakes_a_worker_and_may_be_asked_for_again_once_it_is_done(
    keeper: JobKeeper, fleet: RunnerFleet
) -> None:
    tag = job_keys.user_tag("ann")
    assert await keeper.add("j", user_id="ann")
    await keeper.client.flushall()
    await keeper.sweep()
    assert (keeper.starter.wanted, await keeper.queued(tag)) == (["ann"], ["j"])
    config = RunnerConfig(
        name="own", tag=tag, message_keys=SECRETS.job_keys(tag), valkey_url=fleet.harness.url
    )
    fleet.runners.append(RunnerProcess(fleet.folder, config))
    await keeper.until({"j": "done"})
    assert not await keeper.add("j", user_id="ann"), "its result is there"
    await keeper.until({"j": "done"})
    await keeper.client.flushall()
    assert await keeper.add("j", user_id="ann")
    with pytest.raises(JobIdReused):
        await keeper.jobs.enqueue(Job(job_id="j", name="other"), user_id="ann", digest="another")


async def test_a_users_job_that_waits_wakes_a_worker_if_it_is_new_or_was_put_back(
    keeper: JobKeeper, fleet: RunnerFleet
) -> None:
    """Its producer may have found Temporal away, or have no way to it."""
    tag = job_keys.user_tag("ann")
    await keeper.add("j", JobScript(fails="x"), user_id="ann")
    await keeper.sweep()
    assert keeper.starter.wanted == ["ann"]
    async with keeper.database.session() as session:
        await session.execute(text("update kept_jobs set created_at = now() - interval '1 hour'"))
    await keeper.sweep()
    assert keeper.starter.wanted == ["ann"], "a login that is refused is not asked about for ever"
    config = RunnerConfig(
        name="own", tag=tag, message_keys=SECRETS.job_keys(tag), valkey_url=fleet.harness.url
    )
    fleet.runners.append(runner := RunnerProcess(fleet.folder, config))
    await keeper.until({"j": "failed"})
    runner.close()
    await asyncio.to_thread(fleet.harness.call, job_calls.requeue(["j"], tag))
    await keeper.sweep()
    assert (keeper.starter.wanted, await keeper.outcomes()) == (["ann", "ann"], {"j": None})
    await keeper.client.set(keys.mark("ann"), "1")
    await keeper.sweep()
    assert keeper.starter.wanted == ["ann", "ann"]


async def test_a_job_is_accepted_while_valkey_is_away_and_an_alert_while_postgresql_is(
    keeper: JobKeeper, migrated_database: str
) -> None:
    away = connect_valkey(f"redis://127.0.0.1:{free_port()}")
    database = Database(migrated_database)
    assert await KeptJobs(database, JobClient(away, SECRETS)).enqueue(
        Job(job_id="j", name="scripted")
    )
    await keeper.sweep()
    assert await keeper.queued() == [], "it might have run, so its timeout is waited for"
    await keeper.sweep()
    assert await keeper.queued() == ["j"]
    await database.close()
    await away.aclose()
    nowhere = Database(f"postgresql+asyncpg://berth@127.0.0.1:{free_port()}/none")
    alerts = KeptJobs(nowhere, keeper.jobs.queue)
    assert await alerts.enqueue(Job(job_id="alert-1", name="scripted"), without_database=True)
    assert await keeper.queued() == ["j", "alert-1"]
    await nowhere.close()


async def test_what_is_kept_cannot_be_read_nor_put_under_another_user(keeper: JobKeeper) -> None:
    await keeper.add("j", JobScript(prints="0912345678"), user_id="ann")
    await keeper.add("k", JobScript(prints="0912345678"))
    rows = await keeper.rows()
    assert all(b"0912345678" not in row.sealed for row in rows.values())
    newer = MessageSecrets([SecretVersion(2, b"n" * 32, 0), VERSION])
    rotated = KeptJobs(keeper.database, JobClient(keeper.client, newer))
    assert b"0912345678" in bytes(rotated.unseal(rows["j"]).args)
    async with keeper.database.session() as session:
        await session.execute(text("update kept_jobs set user_id = 'eve' where job_id = 'j'"))
        row = await session.get_one(KeptJob, ("", "k"))
        row.sealed = b"x"
    await keeper.client.flushall()
    await keeper.sweep()
    assert await keeper.outcomes() == {"j": "failed", "k": "failed"}
    async with keeper.database.session() as session:
        reasons = [letter.reason for letter in await session.scalars(select(DeadLetterRow))]
    assert all("its message secret was retired" in reason for reason in reasons), reasons


async def test_what_a_users_worker_wrote_of_its_jobs_holds_up_nobody_elses(
    keeper: JobKeeper, fleet: RunnerFleet
) -> None:
    for name in ("a", "b", "c"):
        await keeper.add(name, user_id="eve")
    await keeper.add("z")
    await keeper.client.flushall()
    tag = job_keys.user_tag("eve")
    await keeper.client.set(job_keys.job(tag, "a"), "no job")
    await reply_of(keeper.client.hset(job_keys.job(tag, "b"), "state", "failed"))
    await reply_of(keeper.client.zadd(job_keys.failed(tag), {"b": float("inf")}))
    await keeper.client.set(job_keys.result(tag, "c"), b"{\x00 no result")
    await keeper.client.set(job_keys.meta(tag), "no settings")
    async with keeper.database.session() as session:
        await keep_settings(session, "eve", {"halt": "1"})
        await keep_settings(session, "", {"halt": "1"})
    await keeper.sweeper.restore_settings()
    assert await reply_of(keeper.client.hget(job_keys.meta(job_keys.FLEET_TAG), "halt")) == b"1"
    await keeper.client.delete(job_keys.meta(tag))
    await keeper.sweep()
    assert await keeper.queued() == ["z"]
    for _ in range(2):
        await keeper.sweep()
    assert await keeper.outcomes() == {"a": "failed", "b": "failed", "c": "failed", "z": None}
    async with keeper.database.session() as session:
        letters = {
            letter.subject: letter.count for letter in await session.scalars(select(DeadLetterRow))
        }
    assert sorted(letters) == ["a", "b", "c"]
    assert letters["a"] == 1


async def test_settings_that_a_users_worker_ruined_hold_up_nobody_elses_jobs(
    keeper: JobKeeper,
) -> None:
    """A script fails on them, which is no outage of Valkey."""
    await keeper.add("a", user_id="eve")
    await keeper.add("z")
    await keeper.client.flushall()
    await reply_of(keeper.client.hset(job_keys.meta(job_keys.user_tag("eve")), "sequence", "none"))
    for _ in range(2):
        await keeper.sweep()
    assert await keeper.queued() == ["z"]
    assert await keeper.outcomes() == {"a": None, "z": None}


async def test_an_end_of_a_job_that_postgresql_cannot_look_up_hides_no_other(
    keeper: JobKeeper, fleet: RunnerFleet
) -> None:
    await keeper.client.xadd(job_keys.events(job_keys.FLEET_TAG), {"job": b"\x00"})
    await asyncio.to_thread(fleet.start)
    await keeper.add("j")
    await asyncio.to_thread(fleet.result, "j")
    await keeper.sweeper.mark_ended_jobs_due()
    assert await keeper.sweeper.sweep() == 1
    assert await keeper.outcomes() == {"j": "done"}
