"""Each child has a cgroup with a limit of memory, where the runner may make one; else its resident
size is looked at."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.servers import ValkeyServer
from tests.support.jobs.application import Application
from tests.support.jobs.runners import RunnerProcess
from tests.support.waiting import eventually
from worker_runtime.jobs.own_types.memory import GroupEntry, open_job_groups
from worker_runtime.process.log import Log

MIB = 1024 * 1024
limited = pytest.mark.needs("memory limits")


@pytest.fixture
def store(valkey_server: ValkeyServer, manifest: bytes) -> Iterator[Application]:
    """An application whose runners a test starts."""
    folder = Path(tempfile.mkdtemp(prefix="berth-shop-"))
    application = Application(valkey_server.url, folder)
    application.load_types(manifest)
    yield application
    application.close()
    shutil.rmtree(folder)


def folder_of(runner: RunnerProcess) -> Path:
    """The folder of a runner's cgroups."""
    [line] = runner.logged("own_jobs_memory")
    assert line["limited_by"].startswith("cgroup v")
    return Path(line["folder"])


def groups_of(runner: RunnerProcess) -> list[Path]:
    return [path for path in folder_of(runner).iterdir() if path.is_dir()]


def group_with(runner: RunnerProcess, pid: int) -> Path:
    [group] = [
        path
        for path in groups_of(runner)
        if str(pid) in (path / "cgroup.procs").read_text().split()
    ]
    return group


def read_limit(group: Path, *names: str) -> int:
    """The number in the first of these files that is there: v1 and v2 name them differently."""
    [file] = [group / name for name in names if (group / name).exists()][:1]
    return int(file.read_text())


def hard_limit(group: Path) -> int:
    return read_limit(group, "memory.limit_in_bytes", "memory.max")


@limited
@pytest.mark.parametrize("where", ["here", "process", "ignored process"])
def test_a_job_that_leaps_far_beyond_its_memory_dies_before_it_has_it(
    store: Application, where: str
) -> None:
    runner = store.start(slots=1, recycle=100)
    assert store.value(store.add("leap", mebibytes=40)) == 40 * MIB
    job_id = store.add("leap", mebibytes=2048, where=where)
    code, detail = store.failure(job_id)
    assert (code, store.result(job_id).attempt) == ("JOB_MEMORY_EXCEEDED", 1), detail
    # All groups of the runner together, since the first one was made.
    peak = read_limit(folder_of(runner), "memory.max_usage_in_bytes", "memory.peak")
    assert 64 * MIB <= peak < 300 * MIB
    assert store.value(store.add("leap", mebibytes=40)) == 40 * MIB


@limited
def test_the_cgroup_of_a_child_goes_with_it_and_the_folder_with_the_runner(
    store: Application,
) -> None:
    runner = store.start(slots=1)
    pids = {store.value(store.add("describe"))["pid"] for _ in range(5)}
    assert len(pids) == 5
    eventually(lambda: len(groups_of(runner)) == 1, "only the group of the spare child")
    folder = folder_of(runner)
    runner.send(signal.SIGTERM)
    assert runner.wait() == 0
    assert not folder.exists()


@limited
def test_what_a_killed_runner_has_left_is_removed_by_the_next_one_and_nothing_of_a_live_one(
    store: Application,
) -> None:
    gate, ledger = store.path("gate"), store.path("kept")
    dead, alive = store.start("dead"), store.start("alive")
    for _ in range(12):
        store.add("spend", ledger=ledger, until=gate)
    store.started("kept", 12)
    leftover, kept = folder_of(dead), folder_of(alive)
    assert len(groups_of(alive)) >= 4
    dead.send(signal.SIGKILL)
    dead.wait()
    assert leftover.exists()
    store.start("next")
    assert not leftover.exists()
    assert kept.exists()
    assert len(groups_of(alive)) >= 4
    store.open("gate")


@limited
def test_a_killed_fork_server_leaves_no_cgroup(store: Application) -> None:
    runner = store.start(slots=2)
    before = set(groups_of(runner))
    server = store.fork_server(runner)
    os.kill(server, signal.SIGKILL)
    assert store.value(store.add("leap", mebibytes=1)) == MIB
    eventually(lambda: not before & set(groups_of(runner)), "the end of the former groups")


@limited
def test_a_recycled_child_has_the_limit_of_the_job_that_it_runs(store: Application) -> None:
    runner = store.start(slots=1, recycle=100)
    gates = [store.path(f"gate-{number}") for number in range(2)]
    limits, pids = [], []
    for number, mebibytes in enumerate((0, 150)):
        ledger = f"pids-{number}"
        store.add(
            "leap_further", mebibytes=mebibytes, ledger=store.path(ledger), until=gates[number]
        )
        [pid] = store.started(ledger)
        pids.append(int(pid))
        limits.append(hard_limit(group_with(runner, int(pid))))
        store.open(f"gate-{number}")
        if number == 0:
            # In between a job of a type that may have less: the same process runs it.
            assert store.value(store.add("leap", mebibytes=1)) == MIB
    assert pids[0] == pids[1]
    assert limits[0] == limits[1]
    # Now this process has more than `leap` may have: another one runs it, and is not blamed.
    assert store.value(store.add("leap", mebibytes=1)) == MIB
    last = store.value(store.add("leap_further", mebibytes=1))
    assert last != pids[0]


@limited
def test_no_process_but_a_child_of_the_fork_server_is_put_into_a_cgroup() -> None:
    """The fork server holds the application's code: it may name any process."""
    groups = open_job_groups(Log())
    assert groups is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sleeper:
        try:
            own, parent = os.getpid(), os.getppid()
            for number, pid, server in ((1, sleeper.pid, own), (2, own, own), (3, parent, own)):
                groups.enter(number, pid, server, 64 * MIB)
            entries: list[GroupEntry] = []

            def have_come() -> bool:
                entries.extend(groups.entries())
                return len(entries) == 3

            eventually(have_come, "what became of all three")
            assert [(entry.number, entry.is_foreign) for entry in entries] == [
                (1, False),
                (2, True),
                (3, True),
            ]
            [group] = [entry.group for entry in entries if entry.group is not None]
            assert (group.group.path / "cgroup.procs").read_text().split() == [str(sleeper.pid)]
            assert [path for path in groups.folder.iterdir() if path.is_dir()] == [group.group.path]
            groups.end(group)  # what is left in it is killed
            assert sleeper.wait(20) == -signal.SIGKILL
        finally:
            sleeper.kill()
            groups.close()
    assert not groups.folder.exists()


@pytest.mark.needs("root")
def test_where_no_cgroup_can_be_made_the_resident_size_is_looked_at_and_the_log_says_so(
    store: Application,
) -> None:
    hide = 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"'
    store.before = [*store.before, "unshare", "--mount", "sh", "-c", hide, "sh"]
    runner = store.start(slots=1)
    [line] = runner.logged("own_jobs_memory")
    assert line["limited_by"] == "resident size"
    assert line["reason"]
    assert store.value(store.add("grow", mebibytes=40)) == 40 * MIB
    assert store.failure(store.add("grow", mebibytes=200))[0] == "JOB_MEMORY_EXCEEDED"
