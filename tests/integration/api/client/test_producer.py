"""The producers of `berth-jobs` before the real API: what they enqueue, wait for and are
refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from infra.berth_jobs import errors, job
from infra.berth_jobs.manifest import build_manifest
from infra.berth_jobs.send import AsyncProducer, Producer
from infra.jobs.applications import add_application
from tests.support.clients.connections import line_to
from tests.support.jobs.hand_runner import HandRunner
from tests.support.systems.api import ServedApi, make_key, served
from worker_runtime.jobs.protocol.messages import JobCancelled


@job(name="jobs.resize")
def resize(path: str, width: int = 800) -> str:
    """Resizes an image."""
    return path


@job(name="jobs.once", unique_for=60)
def once(page: str) -> None:
    """Runs once a minute."""


class ProducerCalls:
    """A producer of either kind, whose methods are awaited."""

    def __init__(self, producer: Any) -> None:
        self.producer = producer

    async def __call__(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.producer, Producer):
            return await asyncio.to_thread(method, *args, **kwargs)
        return await method(*args, **kwargs)


#: Unit tests show that both send the same; these three need both.
both_kinds = pytest.mark.parametrize("connect", ["blocking", "asyncio"], indirect=True)


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Any:
    kind = getattr(request, "param", "blocking")

    @asynccontextmanager
    async def connected(url: str, key: str) -> AsyncIterator[ProducerCalls]:
        url = url.removesuffix("/v1")
        if kind == "blocking":
            with Producer(url, key, application="shop") as producer:
                yield ProducerCalls(producer)
        else:
            async with AsyncProducer(url, key, application="shop") as producer:
                yield ProducerCalls(producer)

    return connected


@pytest.fixture
async def shop(api: ServedApi) -> ServedApi:
    async with api.services.database.session() as session:  # other tests have used it, too
        await session.execute(text("delete from kept_jobs"))
        await session.execute(text("delete from job_applications"))
        await add_application(session, "shop", "a test")
    return api


@pytest.fixture
def runner(shop: ServedApi) -> Iterator[HandRunner]:
    runner = HandRunner(shop.settings)
    runner.announce(build_manifest("shop", [resize, once], "shop").canonical_bytes())
    yield runner
    runner.client.close()


@pytest.fixture
async def call(shop: ServedApi, runner: HandRunner, connect: Any) -> AsyncIterator[ProducerCalls]:
    """A producer whose key has the scope `jobs` and no other."""
    key = await make_key(shop.settings, "operator", scopes=("jobs",))
    async with served(shop) as url, connect(url, key) as calls:
        yield calls


@both_kinds
async def test_a_job_is_enqueued_shown_and_its_result_returned(
    call: ProducerCalls, runner: HandRunner
) -> None:
    sent = await call(call.producer.enqueue, resize, "a.png", width=7)
    assert (await call(sent.snapshot)).state == "waiting"
    [claimed] = runner.claim()
    assert claimed.job_id == sent.id
    assert bytes(runner.read(claimed).args) == b'{"path":"a.png","width":7}'
    waiting = asyncio.ensure_future(call(sent.result, 20))
    with pytest.raises(errors.JobNotEnded, match="it is running"):
        await call(sent.wait, 0.2)
    runner.end(claimed, "a.png@7")
    assert await waiting == "a.png@7"
    again = call.producer.job(sent.id)
    assert await call(again.result, 5) == "a.png@7"


async def test_options_reach_the_job(call: ProducerCalls, runner: HandRunner) -> None:
    producer = call.producer.with_options(job_id="mine", queue="images", priority=9, group="a")
    producer = producer.with_options(timeout=7, max_attempts=2, result_ttl=timedelta(days=2))
    sent = await call(producer.enqueue, resize, "a.png")
    [claimed] = runner.claim()
    job = runner.read(claimed)
    assert (sent.id, job.priority, job.timeout, job.attempts) == ("mine", 9, 7.0, 2)
    assert (job.group, job.queue, job.result_ttl) == ("a", "images", 172_800)


async def test_a_job_waits_for_its_time(call: ProducerCalls, runner: HandRunner) -> None:
    now = datetime.now(UTC)
    later = await call(call.producer.enqueue_in, 600, resize, "a.png")
    at = await call(call.producer.enqueue_at, now + timedelta(hours=2), resize, "b.png")
    past = await call(call.producer.enqueue_at, now - timedelta(hours=2), resize, "c.png")
    seen = [await call(sent.snapshot) for sent in (later, at, past)]
    assert [snapshot.state for snapshot in seen] == ["delayed", "delayed", "waiting"]
    assert (seen[0].due_at - now).total_seconds() == pytest.approx(600, abs=30)
    assert (seen[1].due_at - now).total_seconds() == pytest.approx(7200, abs=30)


@both_kinds
async def test_many_jobs_are_enqueued_in_their_order(
    call: ProducerCalls, runner: HandRunner
) -> None:
    calls = [call.producer.call(resize, f"{number}.png") for number in range(520)]
    sent = await call(call.producer.enqueue_many, calls)
    claimed = [taken.job_id for _ in range(52) for taken in runner.claim(10)]
    assert claimed == [each.id for each in sent]


@both_kinds
async def test_an_answer_that_was_lost_enqueues_nothing_twice(
    shop: ServedApi, runner: HandRunner, connect: Any
) -> None:
    key = await make_key(shop.settings, "operator", scopes=("jobs",))
    async with served(shop) as url, line_to(url) as line, connect(line.url, key) as call:
        line.lose = 2
        await call(call.producer.enqueue, resize, "a.png")
        line.lose = 1
        await call(
            call.producer.enqueue_many, [call.producer.call(resize, "b.png") for _ in range(3)]
        )
        assert line.lose == 0
    assert len(runner.claim(10)) == 4


async def test_a_second_job_with_the_unique_key_is_the_first_one(
    call: ProducerCalls, runner: HandRunner
) -> None:
    first = await call(call.producer.enqueue, once, "a")
    second = await call(call.producer.enqueue, once, "a")
    assert (second.id, first.is_new, second.is_new) == (first.id, True, False)
    assert len(runner.claim(10)) == 1


async def test_a_waiting_job_is_cancelled(call: ProducerCalls, runner: HandRunner) -> None:
    sent = await call(call.producer.enqueue, resize, "a.png")
    assert (await call(sent.cancel)).state == "cancelled"
    with pytest.raises(errors.JobCancelled, match=JobCancelled.code):
        await call(sent.result, 5)


async def test_refusals_say_what_to_do(call: ProducerCalls, runner: HandRunner) -> None:
    with pytest.raises(errors.InvalidArguments) as invalid:
        await call(call.producer.enqueue, "shop/jobs.resize", path="a.png", width="wide")
    assert [path for path, _ in invalid.value.fields] == ["args.width"]
    with pytest.raises(errors.UnknownJobType, match=r"JOB_TYPE_UNKNOWN: .*shop/nothing"):
        await call(call.producer.enqueue, "shop/nothing")
    with pytest.raises(errors.UnknownJobType, match="APPLICATION_NOT_FOUND"):
        await call(call.producer.enqueue, "store/jobs.resize", path="a.png")
    with pytest.raises(errors.JobTooLarge):
        await call(call.producer.enqueue, resize, "x" * 66_000)
    with pytest.raises(errors.JobNotFound):
        await call(call.producer.job("nobody-knows").snapshot)
    named = call.producer.with_options(job_id="one")
    await call(named.enqueue, resize, "a.png")
    with pytest.raises(errors.JobIdReused):
        await call(named.enqueue, resize, "b.png")


async def test_one_wrong_job_of_a_batch_is_named_and_none_is_enqueued(
    call: ProducerCalls, runner: HandRunner
) -> None:
    calls = [call.producer.call("shop/jobs.resize", path=path) for path in ("a.png", 7)]
    with pytest.raises(errors.InvalidArguments) as invalid:
        await call(call.producer.enqueue_many, calls)
    assert [path for path, _ in invalid.value.fields] == ["jobs.1.args.path"]
    assert runner.claim(10) == []


async def test_a_key_without_the_scope_is_refused(shop: ServedApi, connect: Any) -> None:
    key = await make_key(shop.settings, "operator", scopes=("read",))
    async with served(shop) as url, connect(url, key) as call:
        with pytest.raises(errors.Refused, match="SCOPE_MISSING"):
            await call(call.producer.enqueue, resize, "a.png")
