"""The testing mode: jobs are recorded, or run inline, and the code under test notices no
difference."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from infra.berth_jobs import RetryLater, context, errors, job, send, testing
from infra.berth_jobs.manifest import BadManifest, build_manifest
from infra.berth_jobs.send import AsyncProducer, Producer


class Size(msgspec.Struct):
    width: int
    height: int = 100


@job(name="testing.resize", secrets=("STORE_TOKEN", "UNSET"))
def resize(path: str, size: Size | None = None) -> dict[str, Any]:
    context().progress({"step": 1})
    running = context()
    target_size = size or Size(1)
    return {
        "path": path,
        "width": target_size.width,
        "attempt": running.attempt,
        "type": running.type,
        "secrets": dict(running.secrets),
    }


@job(name="testing.add")
async def add(first: int, second: int) -> int:
    await asyncio.sleep(0)
    return first + second


@job(name="testing.fail")
def fail(reason: str) -> None:
    raise RetryLater(reason)


class Receipt(BaseModel):
    total: int


@job(name="testing.receipts")
def make_receipts(total: int) -> dict[int, list[Receipt]]:
    return {total: [Receipt(total=total)]}


@job(name="testing.outer")
def outer(count: int) -> None:
    send.enqueue_many(send.call(add, number, 1) for number in range(count))


def test_a_decorated_function_is_still_a_function() -> None:
    assert resize("a.png", Size(7))["attempt"] == 1
    assert asyncio.run(add(1, second=2)) == 3
    with pytest.raises(RetryLater):
        fail("full")


def test_two_types_of_one_name_are_refused() -> None:
    with pytest.raises(BadManifest, match=r"testing\.add is declared twice"):
        build_manifest("shop", [add, add], "shop")


def test_recorded_jobs_do_not_run_and_can_be_asserted() -> None:
    with testing.record() as sent:
        first = send.enqueue(resize, "a.png", size=Size(7))
        send.with_options(priority=9).enqueue("shop/testing.resize", path="b.png")
        send.enqueue_in(60, add, 1, second=2)
    assert [recorded.type for recorded in sent.jobs] == [
        "testing/testing.resize",
        "shop/testing.resize",
        "testing/testing.add",
    ]
    recorded = sent.assert_enqueued(resize, size=Size(7))
    assert (recorded.job_id, recorded.args["path"]) == (first.id, "a.png")
    assert sent.assert_enqueued("shop/testing.resize", path="b.png").options.priority == 9
    assert sent.assert_enqueued("testing.add").options.delay_s == 60
    assert len(sent.of(resize)) == 2
    with pytest.raises(
        AssertionError, match=r"testing\.add\(first=2\) was not enqueued; enqueued was:\n"
    ):
        sent.assert_enqueued(add, first=2)
    with pytest.raises(AssertionError, match=r"testing\.add"):
        sent.assert_nothing_enqueued()
    sent.assert_nothing_enqueued(fail)


def test_a_recorded_job_is_not_waited_for_but_can_be_cancelled() -> None:
    with testing.record():
        sent = send.enqueue(add, 1, 2)
        with pytest.raises(testing.NotRun, match="run_inline"):
            sent.result(timeout=60)
        assert sent.progress() is None
        assert sent.cancel().state == "cancelled"
        with pytest.raises(errors.JobCancelled):
            sent.result()
        with pytest.raises(errors.JobNotFound):
            send.job("unknown").snapshot()


def test_inline_jobs_run_once_each_with_a_context_and_their_own_secrets() -> None:
    secrets = {"STORE_TOKEN": "t", "OTHER": "o"}
    with testing.run_inline(secrets=secrets) as runner:
        producer = send.with_options(job_id="resize-1")
        sent = producer.enqueue(resize, "a.png", Size(7))
        assert producer.enqueue(resize, "a.png", Size(7)).id == sent.id
        assert sent.result() == {
            "path": "a.png",
            "width": 7,
            "attempt": 1,
            "type": "testing/testing.resize",
            "secrets": {"STORE_TOKEN": "t"},
        }
        assert sent.progress() == {"step": 1}
        with pytest.raises(errors.JobIdReused):
            producer.enqueue(resize, "b.png")
    assert len(runner.jobs) == 1


def test_an_inline_result_comes_back_as_the_annotated_type() -> None:
    with testing.run_inline():
        assert send.enqueue(make_receipts, 3).result() == {3: [Receipt(total=3)]}


def test_async_jobs_run_inline_with_and_without_a_loop() -> None:
    with testing.run_inline():
        assert send.enqueue(add, 1, 2).result() == 3

        async def from_a_loop() -> int:
            async with AsyncProducer("http://api.example", "key", application="shop") as producer:
                return await (await producer.enqueue(add, 3, 4)).result()

        assert asyncio.run(from_a_loop()) == 7


def test_jobs_that_a_job_enqueues_run_inline_too() -> None:
    with testing.run_inline() as runner:
        send.enqueue(outer, 3)
    assert [recorded.snapshot.value for recorded in runner.of(add)] == [1, 2, 3]


def test_an_error_of_an_inline_job_leaves_the_call_that_enqueued_it() -> None:
    with testing.run_inline(), pytest.raises(RetryLater, match="full"):
        send.enqueue(fail, "full")


def test_an_error_of_an_inline_job_is_its_outcome_if_the_test_says_so() -> None:
    with testing.run_inline(raise_errors=False):
        sent = send.enqueue(fail, "full")
        with pytest.raises(errors.JobFailed, match="RetryLater: full"):
            sent.result()
        assert sent.snapshot().attempt == 1


def test_what_production_would_refuse_is_refused_in_tests() -> None:
    with testing.run_inline():
        with pytest.raises(errors.InvalidArguments) as invalid:
            send.enqueue("shop/testing.add", first="x", second=1)
        assert invalid.value.fields == [("args.first", "Expected `int`, got `str`")]
        with pytest.raises(errors.InvalidArguments, match=r"args\.size\.width"):
            send.enqueue(resize, "a.png", {"width": "wide"})  # type: ignore[call-overload]
        with pytest.raises(errors.UnknownJobType, match="shop/nothing"):
            send.enqueue("shop/nothing")
        with pytest.raises(errors.JobTooLarge):
            send.enqueue(resize, "x" * 70_000)
        with pytest.raises(TypeError, match="unexpected keyword"):
            send.enqueue(resize, "a", colour="red")  # type: ignore[call-arg, arg-type]


def test_every_producer_of_every_thread_sends_to_the_innermost_block() -> None:
    with (
        Producer("http://127.0.0.1:9", "key", application="shop") as producer,
        testing.record() as outer_block,
    ):
        thread = threading.Thread(target=producer.enqueue, args=(add, 1, 2))
        thread.start()
        thread.join()
        with testing.record() as inner_block:
            producer.enqueue(add, 3, 4)
    assert [recorded.args["first"] for recorded in outer_block.jobs] == [1]
    assert [recorded.args["first"] for recorded in inner_block.jobs] == [3]


def test_outside_of_a_block_a_function_needs_its_application(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BERTH_JOBS_APPLICATION", raising=False)
    with pytest.raises(errors.NotConfigured, match="BERTH_JOBS_APPLICATION"):
        send.call(add, 1, 2)
    monkeypatch.setenv("BERTH_JOBS_APPLICATION", "shop")
    assert send.call(add, 1, 2).type == "shop/testing.add"


PLUGGED_IN = """
from berth_jobs import job, send

@job(name="plugin.double")
def double(number: int) -> int:
    return 2 * number

def test_recorded(berth_jobs_recorded):
    send.enqueue(double, 4)
    berth_jobs_recorded.assert_enqueued(double, number=4)

def test_inline(berth_jobs_inline):
    assert send.enqueue(double, 4).result() == 8
"""


def test_pytest_finds_the_fixtures_where_the_package_is_installed(
    jobs_distribution: Path, tmp_path: Path
) -> None:
    (tmp_path / "test_shop.py").write_text(PLUGGED_IN)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            tmp_path,
            tmp_path,
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(jobs_distribution)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
