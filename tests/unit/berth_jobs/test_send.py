"""An enqueue is repeated until the API has answered, with the same id, and its errors say what to
do."""

from __future__ import annotations

import operator
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import BaseModel

from infra.berth_jobs import api_calls, errors, job, send
from infra.berth_jobs.connections import (
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    URL_VARIABLE,
    ProducerSettings,
)
from infra.berth_jobs.send import Producer
from tests.support.clients.scripted_api import KEY, URL, ScriptedProducerApi, job_view

AT = datetime(2026, 11, 27, 1, tzinfo=UTC)


class Bill(BaseModel):
    total: int
    at: datetime | None = None


class BillSize(msgspec.Struct):
    width: int
    receipt: Bill | None = None


@job(name="send.model")
def give_model() -> Bill:
    return Bill(total=1)


@job(name="send.models")
async def give_models() -> list[Bill]:
    return []


@job(name="send.numbers")
def give_numbers() -> dict[int, Bill]:
    return {}


@job(name="send.time")
def give_time() -> datetime:
    return datetime.now(UTC)


@job(name="send.struct")
def give_struct() -> BillSize | None:
    return None


@job(name="send.either")
def give_either() -> Bill | BillSize:
    return BillSize(1)


def resize(producer: Any) -> Any:
    return producer.enqueue("shop/resize_image", image_id=7)


def test_a_job_is_one_request_with_a_job_id_of_its_own(api: ScriptedProducerApi) -> None:
    api.answer(job_view(), 202)
    sent = api.run(resize)
    (request,) = api.requests
    assert str(request.url) == f"{URL}/v1/jobs"
    assert request.headers["x-api-key"] == KEY
    assert api.bodies() == [
        {"type": "shop/resize_image", "args": {"image_id": 7}, "options": {"job_id": sent.id}}
    ]


def test_two_jobs_have_two_ids(api: ScriptedProducerApi) -> None:
    api.answer(job_view(), 202)
    assert api.run(resize).id != api.run(resize).id


@pytest.mark.parametrize("trouble", ["cut", "late", "nobody", "503", "502", "429", "HTML"])
def test_the_same_request_is_repeated_until_the_api_has_answered(
    api: ScriptedProducerApi, trouble: str
) -> None:
    match trouble:
        case "cut":
            api.fail(httpx.RemoteProtocolError)
        case "late":
            api.fail(httpx.ReadTimeout)
        case "nobody":
            api.fail(httpx.ConnectError)
        case "503":
            api.refuse(503, "DATABASE_UNAVAILABLE", retryable=True)
        case "502":
            api.answers.append(httpx.Response(502, text="<html>"))
        case "429":
            api.refuse(429, "RATE_LIMITED", retryable=True)
        case "HTML":
            api.answers.append(httpx.Response(200, text="<html>"))
    api.answer(job_view(), 202)
    api.run(resize)
    first, second = api.bodies()
    assert first == second


def test_what_was_certainly_not_enqueued_is_unreachable(api: ScriptedProducerApi) -> None:
    api.fail(httpx.ConnectError)
    api.retry_for = 0.1
    with pytest.raises(errors.Unreachable, match=r"http://api\.example cannot be reached"):
        api.run(resize)


def test_what_may_have_been_enqueued_names_the_id_to_repeat_it_with(
    api: ScriptedProducerApi,
) -> None:
    api.fail(httpx.ReadTimeout)
    api.fail(httpx.ConnectError)
    api.retry_for = 0.4
    with pytest.raises(errors.EnqueueUnsettled, match="repeat the call with this id") as unsettled:
        api.run(resize)
    assert unsettled.value.job_id == api.bodies()[0]["options"]["job_id"]


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (413, "BODY_TOO_LARGE", errors.JobTooLarge),
        (404, "JOB_TYPE_UNKNOWN", errors.UnknownJobType),
        (409, "JOB_ID_REUSED", errors.JobIdReused),
        (403, "SCOPE_MISSING", errors.Refused),
    ],
)
def test_a_refusal_is_raised_with_its_code_and_nothing_is_repeated(
    api: ScriptedProducerApi, status: int, code: str, kind: type[errors.Refused]
) -> None:
    api.refuse(status, code, request_id="r-1")
    with pytest.raises(kind, match=f"^{code}: why") as refused:
        api.run(resize)
    assert type(refused.value) is kind
    assert (refused.value.status, refused.value.code, refused.value.request_id) == (
        status,
        code,
        "r-1",
    )
    assert len(api.requests) == 1


def test_an_argument_that_does_not_fit_is_named(api: ScriptedProducerApi) -> None:
    fields = [{"loc": ["body", "args", "width"], "msg": "expected an integer"}]
    api.refuse(422, "INVALID_REQUEST", errors=fields)
    with pytest.raises(
        errors.InvalidArguments, match=r"args\.width: expected an integer"
    ) as refused:
        api.run(resize)
    assert refused.value.fields == [("args.width", "expected an integer")]


def test_options_are_sent_and_the_producer_keeps_none(api: ScriptedProducerApi) -> None:
    api.answer(job_view(), 202)

    def both(producer: Any) -> Any:
        return producer.with_options(priority=9, group="cart-1", delay=timedelta(minutes=2))

    api.run(both, resize)
    api.run(resize)
    first, second = (body["options"] for body in api.bodies())
    assert {**first, "job_id": ""} == {
        "job_id": "",
        "priority": 9,
        "group": "cart-1",
        "delay_s": 120.0,
    }
    assert list(second) == ["job_id"]


def test_a_job_may_run_later_or_at_a_time(api: ScriptedProducerApi) -> None:
    api.answer(job_view("delayed"), 202)
    api.run(lambda producer: producer.enqueue_in(2.5, "shop/resize_image", image_id=7))
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    api.run(lambda producer: producer.enqueue_at(tomorrow, "shop/resize_image", image_id=7))
    yesterday = datetime.now(UTC) - timedelta(days=1)
    api.run(lambda producer: producer.enqueue_at(yesterday, "shop/resize_image", image_id=7))
    later, at, past = (body["options"] for body in api.bodies())
    assert later["delay_s"] == 2.5
    assert [datetime.fromisoformat(options["run_at"]) for options in (at, past)] == [
        tomorrow,
        yesterday,
    ]


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"priority": 10}, "priority: Expected `int` <= 9"),
        ({"max_attempts": 0}, "max_attempts: Expected `int` >= 1"),
        ({"timeout": -1}, "timeout: a number of seconds"),
        ({"result_ttl": timedelta(days=15)}, "result_ttl: Expected `int` <= 1209600"),
        ({"queue": "no queue"}, "queue: Expected `str` matching"),
        ({"colour": "red"}, "there is no option colour"),
    ],
)
def test_an_option_that_no_job_can_have_is_refused_by_its_name(
    api: ScriptedProducerApi, option: dict[str, Any], reason: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=reason):
        api.run(operator.methodcaller("with_options", **option))


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), timedelta(days=-1)])
def test_a_delay_that_is_none_is_refused_at_once(
    api: ScriptedProducerApi, delay: float | timedelta
) -> None:
    with pytest.raises(ValueError, match="delay"):
        api.run(lambda producer: producer.enqueue_in(delay, "shop/resize_image"))
    assert api.requests == []


def test_a_time_without_a_zone_is_refused_at_once(api: ScriptedProducerApi) -> None:
    with pytest.raises(ValueError, match="time zone"):
        api.run(lambda producer: producer.enqueue_at(datetime(2027, 1, 1), "shop/resize_image"))


def test_arguments_of_a_named_type_have_names(api: ScriptedProducerApi) -> None:
    with pytest.raises(TypeError, match="name the arguments of shop/resize_image"):
        api.run(lambda producer: producer.enqueue("shop/resize_image", 7))


def test_what_json_cannot_hold_is_refused_at_once(api: ScriptedProducerApi) -> None:
    with pytest.raises(TypeError, match="shop/resize_image"):
        api.run(lambda producer: producer.enqueue("shop/resize_image", image_id=object()))
    assert api.requests == []


def test_many_jobs_are_sent_in_batches_in_their_order(api: ScriptedProducerApi) -> None:
    for size in (500, 500, 200):
        api.answer({"jobs": [job_view()] * size}, 202)
    calls = [send.call("shop/resize_image", image_id=number) for number in range(1200)]
    sent = api.run(lambda producer: producer.enqueue_many(calls))
    batches = [body["jobs"] for body in api.bodies()]
    assert [len(batch) for batch in batches] == [500, 500, 200]
    jobs = [job for batch in batches for job in batch]
    assert [job["args"]["image_id"] for job in jobs] == list(range(1200))
    assert [job["options"]["job_id"] for job in jobs] == [job.id for job in sent]
    assert len({job.id for job in sent}) == 1200


def test_a_batch_stays_below_the_size_that_the_api_takes(api: ScriptedProducerApi) -> None:
    for size in (17, 17, 6):
        api.answer({"jobs": [job_view()] * size}, 202)
    calls = [send.call("shop/resize_image", text="x" * 50_000) for _ in range(40)]
    api.run(lambda producer: producer.enqueue_many(calls))
    assert len(api.requests) == 3
    assert max(len(request.content) for request in api.requests) <= api_calls.MAX_BATCH_BYTES


def test_a_lost_answer_to_a_batch_repeats_that_batch_only(api: ScriptedProducerApi) -> None:
    api.answer({"jobs": [job_view()] * 500}, 202)
    api.fail(httpx.ReadTimeout)
    api.answer({"jobs": [job_view()]}, 202)
    calls = [send.call("shop/resize_image", image_id=number) for number in range(501)]
    api.run(lambda producer: producer.enqueue_many(calls))
    first, second, third = api.bodies()
    assert (len(first["jobs"]), second) == (500, third)


def test_a_batch_has_jobs_of_one_application(api: ScriptedProducerApi) -> None:
    for size in (1, 2, 1):
        api.answer({"jobs": [job_view()] * size}, 202)
    calls = [send.call(f"{name}/work") for name in ("shop", "store", "store", "shop")]
    api.run(lambda producer: producer.enqueue_many(calls))
    assert [len(body["jobs"]) for body in api.bodies()] == [1, 2, 1]


def test_a_job_with_an_equal_unique_key_is_the_earlier_one(api: ScriptedProducerApi) -> None:
    api.answer(job_view(id="earlier"), 202)
    sent = api.run(lambda producer: producer.with_options(unique="a").enqueue("shop/resize_image"))
    assert (sent.id, sent.is_new) == ("earlier", False)
    api.answers = []
    api.answer(job_view(), 202)
    assert api.run(resize).is_new


def test_an_empty_list_of_jobs_makes_no_request(api: ScriptedProducerApi) -> None:
    assert api.run(lambda producer: producer.enqueue_many([])) == []
    assert api.requests == []


def test_a_result_is_waited_for_past_an_api_that_is_away(api: ScriptedProducerApi) -> None:
    api.answer(job_view(), 202)
    api.answer(job_view("running", progress={"done": 3}))
    api.fail(httpx.ConnectError)
    api.refuse(503, "VALKEY_UNAVAILABLE", retryable=True)
    api.answer(job_view("done", value={"width": 200}))
    assert api.run(resize, lambda sent: sent.result(timeout=20)) == {"width": 200}
    waits = [request.url.params["wait"] for request in api.requests[1:]]
    assert all(float(wait) <= 20 for wait in waits)


@pytest.mark.parametrize(
    ("function", "value", "result"),
    [
        (give_model, {"total": 3, "at": "2026-11-27T01:00:00Z"}, Bill(total=3, at=AT)),
        (give_models, [{"total": 3}], [Bill(total=3)]),
        (give_numbers, {"7": {"total": 3}}, {7: Bill(total=3)}),
        (give_time, "2026-11-27T01:00:00Z", AT),
        (give_struct, {"width": 2, "receipt": {"total": 3}}, BillSize(2, Bill(total=3))),
        (give_struct, None, None),
        (give_either, {"width": 2}, {"width": 2}),  # JSON does not say which of the two
    ],
)
def test_a_result_comes_back_as_the_annotated_type(
    api: ScriptedProducerApi, function: Any, value: Any, result: Any
) -> None:
    api.answer(job_view(), 202)
    api.answer(job_view("done", value=value))
    steps = operator.methodcaller("enqueue", function), operator.methodcaller("result", 20)
    assert api.run(*steps) == result


def test_a_result_that_does_not_fit_the_annotated_type_is_refused(
    api: ScriptedProducerApi,
) -> None:
    api.answer(job_view(), 202)
    api.answer(job_view("done", value={"total": "many"}))
    with pytest.raises(errors.UnexpectedAnswer, match="something else than declared"):
        api.run(lambda producer: producer.enqueue(give_model), lambda sent: sent.result(timeout=20))


def test_a_wait_that_is_over_says_where_the_job_is(api: ScriptedProducerApi) -> None:
    api.answer(job_view(), 202)
    api.answer(job_view("running"))
    with pytest.raises(errors.JobNotEnded, match="has not ended yet; it is running") as over:
        api.run(resize, lambda sent: sent.wait(timeout=0.3))
    assert isinstance(over.value, TimeoutError)


def test_a_failed_job_raises_its_code_and_reason(api: ScriptedProducerApi) -> None:
    failure = {"code": "JOB_TIMEOUT", "detail": "longer than 2 s", "retryable": False}
    api.answer(job_view("failed", id="job-1", failure=failure))
    with pytest.raises(errors.JobFailed, match="JOB_TIMEOUT: longer than 2 s") as failed:
        api.run(lambda producer: producer.job("job-1"), lambda sent: sent.result(1))
    assert (failed.value.code, failed.value.job_id) == ("JOB_TIMEOUT", "job-1")


def test_a_cancelled_job_and_an_expired_result_are_said_to_be_so(api: ScriptedProducerApi) -> None:
    api.answer(job_view("cancelled"))
    with pytest.raises(errors.JobCancelled):
        api.run(lambda producer: producer.job("job-1"), lambda sent: sent.result(1))
    api.answers = []
    api.answer(job_view("done", finished_at=None))
    with pytest.raises(errors.ResultExpired):
        api.run(lambda producer: producer.job("job-1"), lambda sent: sent.result(1))


def test_a_job_is_looked_at_and_cancelled_by_its_id(api: ScriptedProducerApi) -> None:
    api.answer(job_view("running", progress=[1, 2]))
    api.answer(job_view("cancelled"))
    assert api.run(lambda producer: producer.job("job-1"), lambda sent: sent.progress()) == [1, 2]
    snapshot = api.run(lambda producer: producer.job("job-1"), lambda sent: sent.cancel())
    assert snapshot.state == "cancelled"
    asked = [(request.method, request.url.raw_path) for request in api.requests]
    assert asked == [("GET", b"/v1/jobs/job-1"), ("POST", b"/v1/jobs/job-1/cancel")]


def test_no_job_id_leaves_its_place_in_the_path(api: ScriptedProducerApi) -> None:
    api.refuse(404, "NOT_FOUND")
    for job_id in ("..", "a/b", "a?b"):
        with pytest.raises(errors.JobNotFound):
            api.run(operator.methodcaller("job", job_id), operator.methodcaller("snapshot"))
    paths = [request.url.raw_path for request in api.requests]
    assert paths == [b"/v1/jobs/%2E%2E", b"/v1/jobs/a%2Fb", b"/v1/jobs/a%3Fb"]


@pytest.mark.parametrize(
    ("url", "key"),
    [("api.example", KEY), ("http://api.example:port", KEY), (URL, ""), (URL, "a b")],
)
def test_an_address_or_key_that_is_none_is_refused(url: str, key: str) -> None:
    with pytest.raises(errors.NotConfigured):
        Producer(url, key)


def test_the_functions_of_the_module_read_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (URL_VARIABLE, KEY_VARIABLE, KEY_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.NotConfigured, match="set BERTH_API_URL"):
        send.enqueue("shop/resize_image")
    monkeypatch.setenv(URL_VARIABLE, URL)
    with pytest.raises(errors.NotConfigured, match="set BERTH_API_KEY"):
        send.enqueue("shop/resize_image")
    path = tmp_path / "jobs.key"
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(path))
    with pytest.raises(errors.NotConfigured, match="cannot read"):
        send.enqueue("shop/resize_image")
    path.write_text("from_file\n")
    assert ProducerSettings.from_environment() == (URL, "from_file")
    monkeypatch.setenv(KEY_VARIABLE, "from_variable")
    assert ProducerSettings.from_environment() == (URL, "from_variable")


def test_a_process_that_runs_jobs_loads_no_http_client() -> None:
    """A runner's children import the package, and would each pay for httpx: 40 ms and some MB."""
    code = (
        "import sys, infra.berth_jobs as package\n"
        "assert 'httpx' not in sys.modules\n"
        "assert package.Producer.__module__ == 'infra.berth_jobs.send'\n"
        "assert 'httpx' in sys.modules\n"
        "try:\n"
        "    package.Nothing\n"
        "except AttributeError:\n"
        "    print('as it should be')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "as it should be\n", done.stderr
