"""Each option of a job type, through a real runner, its fork server and its children."""

from __future__ import annotations

import os
import time

import pytest

from infra.berth_jobs.options import JobOptions, job_fields
from tests.support.jobs.application import (
    KEYS,
    NAME,
    OTHER_SECRET,
    STRIPE_KEY,
    TAG,
    Application,
)
from tests.support.systems.processes import alive
from tests.support.waiting import eventually
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import Job, JobStatus


def test_a_plain_function_runs_with_checked_arguments(shop: Application) -> None:
    lines = [{"article": "a", "pieces": 2}, {"article": "b", "pieces": 3}]
    assert shop.value(shop.add("total", lines=lines, factor=2.0)) == 10.0
    wrong = shop.add("total", lines=[{"article": "a", "pieces": 0}])
    unknown = shop.add("total", lines=[], further=1)
    assert shop.failure(wrong)[0] == "MALFORMED_MESSAGE"
    assert "further" in shop.failure(unknown)[1]


def test_a_name_of_its_own_and_a_model_that_is_recognised_by_its_methods(shop: Application) -> None:
    shop.types[f"{NAME}/shop_jobs.model"] = shop.types[f"{NAME}/model"]
    assert shop.value(shop.add("model", model={"code": "a"})) == {"code": "A", "mode": "json"}
    assert "a bad code" in shop.failure(shop.add("model", model={"code": "bad"}))[1]
    schema = shop.types[f"{NAME}/model"].arguments_schema
    assert schema["$defs"]["Code"] == {"type": "string"}


def test_the_context_says_what_runs_and_each_job_has_a_fresh_process_of_another_user(
    shop: Application,
) -> None:
    jobs = [shop.add("describe") for _ in range(3)]
    seen = [shop.value(job_id) for job_id in jobs]
    assert [each["job_id"] for each in seen] == jobs
    assert {each["type"] for each in seen} == {"shop/shop_jobs.describe"}
    assert {each["attempt"] for each in seen} == {1}
    assert len({each["fence"] for each in seen}) == 3
    assert all(76 < each["remaining"] <= 77 for each in seen)
    assert len({each["pid"] for each in seen}) == 3
    server = shop.fork_server(shop.runners[0])
    assert {each["parent"] for each in seen} == {each["imported_in"] for each in seen} == {server}
    assert all(each["uid"] not in (0, os.getuid()) for each in seen)
    output = shop.result(jobs[0]).output
    assert "to standard output" in output
    assert "described" in output


def test_a_type_gets_the_secrets_that_it_names_and_no_others(shop: Application) -> None:
    assert shop.value(shop.add("charge")) == {"STRIPE_KEY": STRIPE_KEY}
    described = shop.value(shop.add("describe"))
    assert described["secrets"] == {}
    assert not any("BERTH" in name or "KEY" in name for name in described["environment"])
    assert OTHER_SECRET not in str(described)


def test_retries_follow_the_errors_and_pauses_that_the_type_names(shop: Application) -> None:
    assert shop.value(shop.add("flaky", fails=2)) == 3
    lasting, other = shop.add("flaky", fails=9), shop.add("flaky", fails=1, kind="ValueError")
    assert shop.result(lasting).attempt == 3
    assert shop.result(other).attempt == 1
    assert "never" in shop.result(other).traceback
    for as_timedelta in (False, True):  # not the 300 s of the type
        assert shop.value(shop.add("later", wait=0.0, as_timedelta=as_timedelta)) == 2
    once = shop.add("flaky", JobOptions(max_attempts=1), fails=1)
    assert shop.result(once).attempt == 1


@pytest.mark.parametrize("function", ["unreadable", "unreadable_among_others"])
def test_what_cannot_be_encoded_fails_its_own_job_and_no_other(
    shop: Application, function: str
) -> None:
    gate = shop.path("unreadable-gate")
    neighbour = shop.add("unreadable_among_others", how="", until=gate)
    jobs = {
        how: shop.add(function, how=how)
        for how in ("error", "output", "text", "result", "no json", "raw")
    }
    assert {shop.failure(job_id)[0] for job_id in jobs.values()} == {"JOB_FAILED"}
    assert shop.result(jobs["error"]).attempt == 2
    assert "caf\\udce9.txt" in shop.failure(jobs["error"])[1]
    assert "make_unreadable" in shop.result(jobs["error"]).traceback
    assert shop.failure(jobs["text"])[1] == "Mute: its text raised RuntimeError"
    assert shop.value(shop.add(function, how="long")) == "x" * 65_000
    shop.open("unreadable-gate")
    assert shop.value(neighbour) is None


def test_the_pauses_of_a_list_are_taken_one_after_the_other(shop: Application) -> None:
    job_id = shop.add("patient", ledger=shop.path("patient"))
    first, second = map(float, shop.started("patient", 2))
    assert second - first >= 0.1  # a pause may be longer by a quarter, and never shorter
    eventually(lambda: shop.field(job_id, "state") == "delayed", "the second pause")
    due_s = float(shop.field(job_id, "due") or 0) / 1000
    assert 299 < due_s - second <= 376


def test_jobs_of_one_group_run_one_after_the_other(shop: Application) -> None:
    ledger, gate = shop.path("groups"), shop.path("group-gate")
    jobs = [shop.add("serve", ledger=ledger, customer=1, until=gate) for _ in range(3)]
    other = shop.add("serve", ledger=ledger, customer=2)
    shop.value(other)
    assert shop.counts("groups") == {"begin-1": 1, "begin-2": 1, "end-2": 1}
    assert shop.field(jobs[1], "state") == "grouped"
    shop.open("group-gate")
    for job_id in jobs:
        shop.value(job_id)
    assert [line for line in shop.lines("groups") if line.endswith("1")] == ["begin-1", "end-1"] * 3


def test_a_second_job_with_the_same_arguments_is_a_duplicate_until_the_first_has_ended(
    shop: Application,
) -> None:
    gate = shop.path("once-gate")
    first = shop.add("once", number=1, until=gate)
    assert shop.add("once", number=1, until=gate) == "duplicate"
    assert shop.value(shop.add("once", number=2)) == 2
    kept = shop.client.execute("KEYS", f"jobs:{{{TAG}}}:unique:*")
    assert 0 < shop.client.execute("PTTL", kept[0]) <= 600_000
    shop.open("once-gate")
    assert shop.value(first) == 1
    assert shop.value(shop.add("once", number=1)) == 1


def test_a_second_job_is_accepted_once_the_time_of_the_first_is_over(shop: Application) -> None:
    gate = shop.path("moment-gate")
    first = shop.add("once_for_a_moment", until=gate)
    assert shop.add("once_for_a_moment", until=gate) == "duplicate"
    second = eventually(
        lambda: (
            added if (added := shop.add("once_for_a_moment", until=gate)) != "duplicate" else ""
        ),
        "a second job while the first one runs",
    )
    assert shop.field(first, "state") == "running"
    shop.open("moment-gate")
    for job_id in (first, second):
        assert shop.value(job_id) is None


def test_a_failure_for_good_is_handled_by_the_type_that_on_failed_names(shop: Application) -> None:
    raised, died = shop.add("doomed", why="no more"), shop.add("doomed", why="", dies=True)
    for job_id, code in ((raised, "JOB_FAILED"), (died, "JOB_OUTCOME_UNKNOWN")):
        assert shop.failure(job_id)[0] == code
        pattern = job_keys.result(TAG, f"{job_id}.failed.*")
        [key] = eventually(lambda: shop.client.execute("KEYS", pattern), "a handler's result")  # noqa: B023
        handled = shop.value(key.decode().rpartition(":")[2])
        assert (handled["job_id"], handled["type"], handled["code"]) == (
            job_id,
            "shop/shop_jobs.doomed",
            code,
        )
        assert handled["arguments"]["why"] == ("no more" if job_id == raised else "")
    large = shop.add("doomed", why="x" * 64_900)
    assert shop.failure(large)[0] == "JOB_FAILED"
    pattern = job_keys.result(TAG, f"{large}.failed.*")
    [key] = eventually(lambda: shop.client.execute("KEYS", pattern), "a handler's result")
    handled = shop.value(key.decode().rpartition(":")[2])
    # With its arguments the handler's job would be larger than a job may be.
    assert (handled["job_id"], handled["arguments"]) == (large, None)
    assert shop.client.execute("ZCARD", job_keys.handlers(TAG)) == 0


def test_failures_whose_handler_no_runner_has_hold_up_no_other_handler(shop: Application) -> None:
    kind = shop.types[f"{NAME}/shop_jobs.doomed"]
    fields = job_fields(kind, b'{"why":"its handler was removed"}')
    orphans = [
        Job(job_id=f"orphan-{number}", **{**fields, "on_failed": f"{NAME}/shop_jobs.removed"})
        for number in range(60)
    ]
    for orphan in orphans:
        assert shop.enqueue(orphan) == "queued"
    for orphan in orphans:
        assert shop.failure(orphan.job_id)[0] == "JOB_FAILED"
    job_id = shop.add("doomed", why="handled")
    pattern = job_keys.result(TAG, f"{job_id}.failed.*")
    eventually(lambda: shop.client.execute("KEYS", pattern), "a handler's result")
    noted = job_keys.handlers(TAG)
    eventually(lambda: shop.client.execute("ZCARD", noted) == len(orphans), "the others' notes")
    [line] = shop.runners[0].logged("failure_handler_unknown")
    assert line["handler"] == f"{NAME}/shop_jobs.removed"
    shop.client.execute("DEL", noted)


def test_a_rate_spaces_the_jobs_of_its_type(shop: Application) -> None:
    jobs = [shop.add("paced", ledger=shop.path("paced")) for _ in range(6)]
    for job_id in jobs:
        shop.value(job_id)
    times = sorted(float(line) for line in shop.lines("paced"))
    assert times[-1] - times[0] >= 5 * 0.05 - 0.03


def test_limits_that_a_type_declares_hold_everywhere_and_on_each_node(shop: Application) -> None:
    shop.start("two")
    for function, at_once in (("alone", 1), ("alone_on_node", 2)):
        gate = shop.path(f"{function}-gate")
        jobs = [shop.add(function, ledger=shop.path(function), until=gate) for _ in range(4)]
        shop.started(function, at_once)
        time.sleep(0.1)
        assert shop.lines(function) == ["begin"] * at_once
        shop.open(f"{function}-gate")
        for job_id in jobs:
            shop.value(job_id)
        running = 0
        for line in shop.lines(function):
            running += 1 if line == "begin" else -1
            assert 0 <= running <= at_once
    shop.runners.pop().close()


def test_a_job_that_takes_too_long_is_killed(shop: Application) -> None:
    code, detail = shop.failure(shop.add("hang"))
    assert code == "JOB_OUTCOME_UNKNOWN"
    assert "0.3 s" in detail


def test_a_job_with_more_memory_than_its_type_may_have_is_killed_with_what_it_has_started(
    shop: Application,
) -> None:
    assert shop.value(shop.add("grow", mebibytes=40)) == 40 << 20
    for where in ("here", "process", "process of a thread", "shared memory"):
        job_id = shop.add("grow", mebibytes=200, where=where)
        assert shop.failure(job_id)[0] == "JOB_MEMORY_EXCEEDED", where
        assert shop.result(job_id).attempt == 1


def test_jobs_that_shared_a_process_with_one_that_took_too_much_memory_run_again(
    shop: Application,
) -> None:
    server, ledger = shop.fork_server(shop.runners[0]), shop.path("grown")
    jobs = [shop.add("grow_among_others", ledger=ledger) for _ in range(4)]
    shop.started("grown", 4)
    jobs.append(shop.add("grow_among_others", ledger=ledger, mebibytes=400))
    assert [shop.value(job_id) for job_id in jobs] == [2] * 5
    assert shop.fork_server(shop.runners[0]) == server  # one kill, not one for each job


def test_progress_can_be_seen_while_the_job_runs(shop: Application) -> None:
    job_id = shop.add("report", steps=1, until=shop.path("report-gate"))
    assert eventually(lambda: shop.field(job_id, "progress"), "progress") == '{"step":0}'
    shop.open("report-gate")
    shop.value(job_id)


def test_a_failed_job_keeps_its_last_progress(shop: Application) -> None:
    job_id = shop.add("report", steps=5, fails=True)
    assert shop.failure(job_id)[0] == "JOB_FAILED"
    assert shop.field(job_id, "progress") == '{"step":4}'


def test_jobs_that_share_a_process_each_show_their_progress_and_none_is_harmed_by_a_large_one(
    shop: Application,
) -> None:
    gate = shop.path("report-among-gate")
    jobs = {label: shop.add("report_among_others", label=label, until=gate) for label in "abcd"}
    for label, job_id in jobs.items():
        shown = eventually(lambda: shop.field(job_id, "progress"), "progress")  # noqa: B023
        assert shown == f'"{label}"'
    for size in (9_000, 170_000, 500_000):
        large = shop.add("report_among_others", label="x", repeat=size)
        shop.value(large)
        assert f"progress of {size + 2} bytes is not shown" in shop.result(large).output
    shop.open("report-among-gate")
    for job_id in jobs.values():
        shop.value(job_id)


def test_several_jobs_of_an_async_type_share_a_process_and_keep_their_own_ends(
    shop: Application,
) -> None:
    slow = [shop.add("fetch", label=f"slow{number}", seconds=0.3) for number in range(4)]
    failing = shop.add("fetch", label="failing", seconds=0.1, fails=True)
    hanging = shop.add("fetch", JobOptions(timeout_s=0.4), label="hanging", seconds=60.0)
    seen = [shop.value(job_id) for job_id in slow]
    assert [each["job_id"] for each in seen] == slow
    assert len({each["pid"] for each in seen}) == 1
    assert [shop.result(job_id).output for job_id in slow] == [
        f"<slow{n}></slow{n}>" for n in range(4)
    ]
    assert eventually(lambda: shop.field(failing, "state") == "delayed", "a retry")
    assert shop.failure(hanging)[0] == "JOB_OUTCOME_UNKNOWN"
    again = shop.value(shop.add("fetch", label="again"))
    assert again["pid"] == seen[0]["pid"]  # only the hanging job was ended
    assert shop.value(shop.add("fetch_one", seconds=0.0)) != again["pid"]


def test_a_crash_in_a_shared_process_ends_the_jobs_in_it(shop: Application) -> None:
    beside = shop.add("fetch", label="beside", seconds=30.0)
    time.sleep(0.1)
    assert shop.failure(shop.add("fetch", label="exits", exits=True))[0] == "JOB_OUTCOME_UNKNOWN"
    assert shop.failure(beside)[0] == "JOB_OUTCOME_UNKNOWN"
    shop.value(shop.add("fetch", label="next"))


def test_jobs_that_come_while_the_end_of_a_shared_process_is_not_reported_run_in_another(
    shop: Application,
) -> None:
    gate = shop.path("hang-up-gate")
    lost = shop.add("hang_up", until=gate)
    eventually(lambda: shop.field(lost, "state") == "running", "a running job")
    time.sleep(0.1)  # it has hung up, and its process lives on
    jobs = [shop.add("hang_up") for _ in range(3)]
    assert len({shop.value(job_id) for job_id in jobs}) == 1
    assert {shop.result(job_id).attempt for job_id in jobs} == {1}
    shop.open("hang-up-gate")
    assert shop.failure(lost)[0] == "JOB_OUTCOME_UNKNOWN"


def test_a_cancelled_job_ends_alone_or_with_its_process(shop: Application) -> None:
    for function, arguments in (
        ("fetch", {"label": "c", "seconds": 60.0}),
        ("fetch_one", {"seconds": 60.0}),
    ):
        job_id = shop.add(function, **arguments)
        eventually(lambda: shop.field(job_id, "state") == "running", "a running job")  # noqa: B023
        shop.client.run(*job_calls.cancel(job_id, KEYS, TAG))
        assert shop.result(job_id).status is JobStatus.CANCELLED


def test_the_queue_scheduler_is_first_in_first_out_whatever_the_priority(shop: Application) -> None:
    """Also for a runner that was started for another queue by name."""
    suspend(shop)
    jobs = [
        shop.add("ordered", ledger=shop.path("ordered"), label=str(number)) for number in range(5)
    ]
    shop.start("named", queues=("emails",), slots=1)
    for job_id in jobs:
        shop.value(job_id)
    assert shop.lines("ordered") == ["0", "1", "2", "3", "4"]
    shop.runners.pop().close()
    shop.client.run(*job_calls.resume(runner="one", tag=TAG))


def test_priorities_of_types_and_calls_decide_within_a_queue(shop: Application) -> None:
    suspend(shop)
    ledger = shop.path("priorities")
    jobs = [
        shop.add("queued", JobOptions(priority=1), ledger=ledger, label="1"),
        shop.add("queued", ledger=ledger, label="5"),
        shop.add("urgent", ledger=ledger, label="8"),
        shop.add("queued", JobOptions(priority=9), ledger=ledger, label="9"),
        shop.add("urgent", JobOptions(priority=0), ledger=ledger, label="0"),
    ]
    shop.start("single", slots=1)
    for job_id in jobs:
        shop.value(job_id)
    assert shop.lines("priorities") == ["9", "8", "5", "1", "0"]
    shop.runners.pop().close()
    shop.client.run(*job_calls.resume(runner="one", tag=TAG))


def test_a_job_goes_to_the_queue_of_its_type_or_call_and_to_a_runner_that_serves_it(
    shop: Application,
) -> None:
    suspend(shop)
    ledger = shop.path("queues")
    other = shop.add("queued", ledger=ledger, label="default")
    shop.start("named", queues=("emails",), slots=1)
    shop.value(shop.add("mailed", ledger=ledger, label="by-type"))
    shop.value(shop.add("queued", JobOptions(queue="emails"), ledger=ledger, label="by-call"))
    assert shop.lines("queues") == ["by-type", "by-call"]
    assert shop.field(other, "state") == "waiting"
    shop.runners.pop().close()
    shop.client.run(*job_calls.resume(runner="one", tag=TAG))
    shop.value(other)


def test_what_a_job_leaves_behind_ends_with_it(shop: Application) -> None:
    pid = shop.value(shop.add("leave_behind"))
    eventually(lambda: not alive(pid), "the end of a process that a job has left")


def test_a_result_that_is_too_large_fails_the_job(shop: Application) -> None:
    assert shop.failure(shop.add("huge", size=70_000))[0] == "RESULT_TOO_LARGE"
    assert shop.value(shop.add("huge", size=10)) == "x" * 10


def suspend(shop: Application) -> None:
    """Keeps the runner of all tests from claiming, once it has noticed."""
    shop.client.run(*job_calls.suspend(runner="one", tag=TAG))
    [runner] = [each for each in shop.beats() if each.startswith("one-")]
    key = job_keys.runner(TAG, runner)
    eventually(
        lambda: shop.client.execute("HGET", key, "state") == b"suspended", "a suspended runner"
    )
