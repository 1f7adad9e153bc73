"""kill -9 of child, fork server and runner: no own job is lost, and none doubled that must not
be."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec

from tests.support.jobs.application import KEYS, NAME, PACKAGES, TAG, Application
from tests.support.jobs.runners import RunnerProcess
from tests.support.systems.processes import alive
from tests.support.waiting import eventually
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.own_types.config import OwnTypesConfig
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import JobStatus
from worker_runtime.protocol.launch import ExitCode


def test_a_killed_child_costs_its_job_an_attempt(shop: Application) -> None:
    job_id = shop.add("survive", ledger=shop.path("child"), kill="child")
    assert shop.value(job_id) == 2
    assert shop.lines("child") == [f"{job_id}:1", f"{job_id}:2"]


def test_a_killed_fork_server_is_replaced_and_its_jobs_run_again_if_they_may(
    shop: Application,
) -> None:
    gate, ledger = shop.path("server-gate"), shop.path("server")
    server = shop.fork_server(shop.runners[0])
    again = [shop.add("survive", ledger=ledger, until=gate) for _ in range(3)]
    never = shop.add("spend", ledger=ledger, until=gate)
    shop.started("server", 4)
    children = children_of(server)
    os.kill(server, signal.SIGKILL)
    eventually(lambda: not any(alive(pid) for pid in children), "the end of its children")
    assert shop.failure(never)[0] == "JOB_OUTCOME_UNKNOWN"
    shop.open("server-gate")
    assert [shop.value(job_id) for job_id in again] == [2, 2, 2]
    assert shop.counts("server") == {
        never: 1,
        **{f"{each}:{n}": 1 for each in again for n in (1, 2)},
    }
    assert shop.fork_server(shop.runners[0]) != server
    assert len(shop.runners[0].logged("fork_server_ended")) == 1


def test_a_frozen_fork_server_is_replaced(shop: Application) -> None:
    """Its children cannot be killed through it, so it is killed with them."""
    server = shop.fork_server(shop.runners[0])
    os.kill(server, signal.SIGSTOP)
    job_id = shop.add("hang")
    assert shop.failure(job_id)[0] == "JOB_OUTCOME_UNKNOWN"
    eventually(lambda: not alive(server), "the end of the frozen server")
    assert shop.value(shop.add("huge", size=1)) == "x"


def test_a_child_that_dies_under_a_frozen_fork_server_ends_its_job_before_its_timeout(
    shop: Application,
) -> None:
    """Nobody reports the child's end then. A spare child is ready, so no fork shows that the fork
    server is frozen: the job waited for its timeout, 180 s."""
    gate, ledger = shop.path("frozen-gate"), shop.path("frozen")
    server = shop.fork_server(shop.runners[0])
    # A child of the test before may still be ending.
    eventually(lambda: len(children_of(server)) == 1, "only the spare child")
    [first] = children_of(server)
    job_id = shop.add("spend", ledger=ledger, until=gate)
    shop.started("frozen", 1)
    eventually(lambda: len(children_of(server)) == 2, "the next spare child")
    time.sleep(0.2)  # its fork is confirmed
    os.kill(server, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not alive(server), "the end of the frozen server", 30.0)
    assert shop.failure(job_id)[0] == "JOB_OUTCOME_UNKNOWN"
    assert shop.counts("frozen") == {job_id: 1}
    assert shop.value(shop.add("huge", size=1)) == "x"


def test_a_killed_runner_takes_fork_server_and_children_with_it_and_another_runs_its_jobs(
    shop: Application,
) -> None:
    gate, ledger = shop.path("runner-gate"), shop.path("runner")
    doomed = shop.runners[0]
    server = shop.fork_server(doomed)
    again = [shop.add("survive", ledger=ledger, until=gate) for _ in range(3)]
    never = shop.add("spend", ledger=ledger, until=gate)
    failing = shop.add("doomed", why="it fails, and its handler runs elsewhere")
    shop.started("runner", 4)
    processes = [server, *children_of(server)]
    shop.start("two")
    doomed.send(signal.SIGKILL)
    eventually(lambda: not any(alive(pid) for pid in processes), "the end of its processes")
    shop.open("runner-gate")
    assert [shop.value(job_id) for job_id in again] == [2, 2, 2]
    # Nobody with a key has seen its end, so its result carries no signature: the API says "outcome
    # unknown".
    assert eventually(lambda: shop.field(never, "state") == "failed", "a failed job")
    assert shop.counts("runner") == {
        never: 1,
        **{f"{each}:{n}": 1 for each in again for n in (1, 2)},
    }
    assert shop.result(failing).status is JobStatus.FAILED
    shop.runners.remove(doomed)
    doomed.close()


def test_a_stopped_runner_lets_its_jobs_end_and_leaves_no_process(shop: Application) -> None:
    runner = shop.start("leaving", slots=2)
    server = shop.fork_server(runner)
    job_id = shop.add("fetch_one", seconds=0.3)
    eventually(lambda: shop.field(job_id, "state") == "running", "a running job")
    for each in shop.runners:
        each.send(signal.SIGTERM)
    assert [each.wait() for each in shop.runners] == [0] * len(shop.runners)
    assert shop.value(job_id)
    assert not alive(server)
    assert shop.client.execute("EXISTS", job_keys.beats(TAG)) == 0
    shop.runners.clear()


def test_code_that_cannot_be_imported_ends_the_runner_with_its_traceback(shop: Application) -> None:
    own = OwnTypesConfig(application="shop", modules=("no_such_module",), path=(PACKAGES,))
    config = RunnerConfig(name="bad", valkey_url=shop.url, message_keys=KEYS, tag=TAG, own=own)
    runner = RunnerProcess(shop.folder, config, "worker_runtime.jobs", shop.before)
    assert runner.wait() == ExitCode.BAD_CONFIG
    [line] = runner.logged("job_types_unusable")
    assert "No module named 'no_such_module'" in line["reason"]


def test_a_folder_that_the_jobs_user_cannot_read_ends_the_runner_with_a_sentence(
    shop: Application,
) -> None:
    closed = shop.folder / "closed"
    (closed / "packages").mkdir(parents=True)
    closed.chmod(0o700)
    own = OwnTypesConfig(application=NAME, path=(str(closed / "packages"),))
    config = RunnerConfig(name="shut", valkey_url=shop.url, message_keys=KEYS, tag=TAG, own=own)
    runner = RunnerProcess(shop.folder, config, "worker_runtime.jobs", shop.before)
    shop.runners.append(runner)
    assert runner.wait() == ExitCode.BAD_CONFIG
    [line] = runner.logged("job_types_unusable")
    assert f"cannot read the folder {closed}/packages" in line["reason"]


def test_a_runner_without_a_secret_that_a_type_names_says_so_at_its_start(
    shop: Application,
) -> None:
    own = OwnTypesConfig(application=NAME, modules=("shop_jobs",), path=(PACKAGES,))
    config = RunnerConfig(name="poor", valkey_url=shop.url, message_keys=KEYS, tag=TAG, own=own)
    runner = RunnerProcess(shop.folder, config, "worker_runtime.jobs", shop.before)
    shop.runners.append(runner)
    assert runner.wait() == ExitCode.BAD_CONFIG
    [line] = runner.logged("job_types_unusable")
    assert line["code"] == "JOB_SECRET_MISSING"
    assert "shop/shop_jobs.charge names the secret STRIPE_KEY" in line["reason"]
    # A runner of other queues than the type's needs no such secret.
    mails = msgspec.structs.replace(config, name="mails", queues=("emails",))
    runner = RunnerProcess(shop.folder, mails, "worker_runtime.jobs", shop.before)
    shop.runners.append(runner)
    eventually(lambda: runner.logged("job_runner_registered"), "a registered runner")
    runner.send(signal.SIGTERM)
    assert runner.wait() == 0


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
