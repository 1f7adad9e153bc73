"""Reads processes from the kernel, and does not mistake one for another."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import processes
from infra.node.worker import clean_environment


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()", "a-word-like-no-other"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()  # before that its arguments may not be seen yet
        yield started
        started.kill()


def test_a_process_is_described_with_its_group_and_session(child: subprocess.Popen[bytes]) -> None:
    process = processes.read_process(child.pid)
    assert process is not None
    assert (process.group, process.session, process.parent) == (child.pid, child.pid, os.getpid())
    assert process.alive
    assert processes.live_members(child.pid) == [child.pid]


def test_a_name_with_blanks_and_parentheses_is_read_rightly(tmp_path: Path) -> None:
    program = tmp_path / ") S 1 (x"
    program.symlink_to(sys.executable)
    with subprocess.Popen([str(program), "-c", "input()"], stdin=subprocess.PIPE) as odd:
        process = processes.read_process(odd.pid)
        assert process is not None
        assert process.parent == os.getpid()
        odd.communicate(b"\n")


def test_a_process_is_found_by_a_whole_argument_only(child: subprocess.Popen[bytes]) -> None:
    assert [process.pid for process in processes.find_by_argument("a-word-like-no-other")] == [
        child.pid
    ]
    assert processes.find_by_argument("a-word-like-no") == []


def test_only_the_process_with_the_right_start_time_is_pinned(
    child: subprocess.Popen[bytes],
) -> None:
    started = processes.start_time(child.pid)
    assert processes.open_pidfd(child.pid, started + 1) is None
    pinned = processes.open_pidfd(child.pid, started)
    assert pinned is not None
    processes.signal_pidfd(pinned, signal.SIGKILL)
    assert child.wait(20) == -signal.SIGKILL
    processes.signal_pidfd(pinned, signal.SIGKILL)  # it has ended: no error, and nobody else is hit
    os.close(pinned)
    assert processes.open_pidfd(child.pid, started) is None


def test_a_group_whose_number_belongs_to_a_stranger_is_not_killed(
    child: subprocess.Popen[bytes],
) -> None:
    started = processes.start_time(child.pid)
    processes.kill_group(child.pid, started - 1)
    assert child.poll() is None
    processes.kill_group(child.pid, started)
    assert child.wait(20) == -signal.SIGKILL
    assert processes.group_is_empty(child.pid)


@pytest.fixture
def inherits_orphans() -> Iterator[None]:
    """Makes this process inherit orphans, as the first process of a container does."""
    libc, set_child_subreaper = ctypes.CDLL(None), 36
    libc.prctl(set_child_subreaper, 1)
    yield
    libc.prctl(set_child_subreaper, 0)


@pytest.mark.usefixtures("inherits_orphans")
def test_a_dead_orphan_that_became_our_child_is_reaped() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", "import os, time; print(os.fork() or time.sleep(60), flush=True)"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        assert parent.wait(20) == 0
        assert processes.live_members(parent.pid) == [orphan]
        os.kill(orphan, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while processes.live_members(parent.pid) or processes.read_process(orphan):
            assert time.monotonic() < deadline
    assert processes.group_is_empty(parent.pid)


def test_nobody_lives_under_a_number_beyond_the_kernel_s() -> None:
    assert processes.read_process(2**22 + 1) is None
    with pytest.raises(ProcessLookupError):
        processes.start_time(2**22 + 1)


def test_a_worker_s_environment_holds_nothing_that_is_not_named(tmp_path: Path) -> None:
    source = {
        "PATH": "/bin",
        "LANG": "C.UTF-8",
        "AWS_SECRET_ACCESS_KEY": "x",
        "BERTH_DATABASE_URL": "y",
    }
    assert clean_environment(source, tmp_path) == {
        "PATH": "/bin",
        "LANG": "C.UTF-8",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }
