"""The pool of children: a spare one while there is room for a process, and nothing is left open."""

from __future__ import annotations

import errno
import gc
import os
import selectors
from collections.abc import Iterator

import pytest

from worker_runtime.jobs.child_pool import ChildPool, NotForked
from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.jobs.types.job_registry import JobRegistry

JOB = Job(job_id="a", name="work")


class ForkHost:
    """Forks without children, as long as there is room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.forks = 0

    def fork(self) -> int:
        if self.forks == self.room:
            raise BlockingIOError(errno.EAGAIN, "no room")
        self.forks += 1
        return 1_000_000_000 + self.forks  # no process has this number


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        yield selector


def _open() -> set[str]:
    gc.collect()  # closes what earlier tests have left
    return set(os.listdir("/proc/self/fd"))


def _pool(
    selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch, room: int
) -> ChildPool:
    monkeypatch.setattr(os, "fork", ForkHost(room).fork)
    return ChildPool(JobRegistry(), selector, lambda child: None)


def test_a_spare_child_is_ready_and_others_are_forked_when_they_are_needed(
    selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = _pool(selector, monkeypatch, room=2)
    before = _open()
    assert not pool.has_spare()
    pool.fork_spare()
    assert pool.has_spare()
    children = [pool.take(JOB), pool.take(JOB)]
    assert not pool.has_spare()
    assert len(pool) == 2
    assert len({child.pid for child in children}) == 2
    # A socket and a pipe for each; the children's ends are closed.
    assert len(_open() - before) == 4
    for child in children:
        pool.forget(child)
    assert _open() == before
    assert not selector.get_map()


def test_with_no_room_for_a_process_nothing_stays_open(
    selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = _pool(selector, monkeypatch, room=0)
    before = _open()
    with pytest.raises(NotForked, match="EAGAIN"):
        pool.fork_spare()
    with pytest.raises(NotForked, match="EAGAIN"):
        pool.take(JOB)
    assert len(pool) == 0
    assert not pool.has_spare()
    assert _open() == before


def test_with_no_descriptor_left_nothing_stays_open(
    selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = _pool(selector, monkeypatch, room=4)
    before = _open()

    def no_pipe(_flags: int) -> tuple[int, int]:
        raise OSError(errno.EMFILE, "no descriptor left")

    monkeypatch.setattr(os, "pipe2", no_pipe)
    with pytest.raises(NotForked, match="EMFILE"):
        pool.fork_spare()
    assert len(pool) == 0
    assert _open() == before
