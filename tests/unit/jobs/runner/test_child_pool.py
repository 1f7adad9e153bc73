"""Children that are forked in a row: as many as there is room for, and nothing is left open."""

from __future__ import annotations

import errno
import os
import selectors
from collections.abc import Iterator

import pytest

from worker_runtime.jobs.children.child_pool import ChildPool, JobChild, NotForked
from worker_runtime.jobs.types.job_type import JobRegistry


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
    return set(os.listdir("/proc/self/fd"))


def _nursery(selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch, room: int) -> ChildPool:
    monkeypatch.setattr(os, "fork", ForkHost(room).fork)
    return ChildPool(JobRegistry(), selector, lambda child: None)


def _take_all(nursery: ChildPool, count: int) -> list[JobChild]:
    return [nursery.take() for _ in range(count)]


def test_all_that_are_wanted_stand_ready(
    selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    nursery = _nursery(selector, monkeypatch, room=4)
    before = _open()
    nursery.prepare(1)
    nursery.prepare(4)
    assert len(nursery) == 4
    assert not nursery.short_of(4)
    assert len(_open() - before) == 8  # a socket and a pipe for each; the children's ends are closed
    children = _take_all(nursery, 4)
    assert len({child.pid for child in children}) == 4
    with pytest.raises(NotForked):
        nursery.take()
    for child in children:
        nursery.close(child)
    assert _open() == before
    assert not selector.get_map()


def test_with_room_for_some_these_stand_ready(
    selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    nursery = _nursery(selector, monkeypatch, room=2)
    before = _open()
    nursery.prepare(4)
    assert len(nursery) == 2
    assert nursery.short_of(3)
    assert len(_open() - before) == 4
    with pytest.raises(NotForked, match="EAGAIN"):
        nursery.prepare(4)
    for child in _take_all(nursery, 2):
        nursery.close(child)
    assert _open() == before


def test_with_no_descriptor_left_nothing_stays_open(
    selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    nursery = _nursery(selector, monkeypatch, room=4)
    before = _open()

    def no_pipe(_flags: int) -> tuple[int, int]:
        raise OSError(errno.EMFILE, "no descriptor left")

    monkeypatch.setattr(os, "pipe2", no_pipe)
    with pytest.raises(NotForked, match="EMFILE"):
        nursery.prepare(4)
    assert len(nursery) == 0
    assert _open() == before
