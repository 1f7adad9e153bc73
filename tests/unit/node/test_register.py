"""The register keeps what a killed node must not forget."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.node.protocol import NodeStateUnreadable
from infra.node.register import NodeEntry, NodeRegister
from infra.worker_task import TaskExit


def entry(number: int) -> NodeEntry:
    return NodeEntry(
        task_id=f"task-{number}",
        token=f"token-{number}",
        worker_id=f"w-{number}",
        pool="default",
        version="1",
        launched_at=float(number),
        grace=10.0,
    )


def end(number: int) -> TaskExit:
    return TaskExit(
        task_id=f"task-{number}",
        worker_id=f"w-{number}",
        exit_code=0,
        reason="exited",
        at=1.5,
        detail={"a": "b"},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "register.db"


@pytest.fixture
def register(path: Path) -> Iterator[NodeRegister]:
    opened = NodeRegister(path)
    yield opened
    opened.close()


def test_a_worker_is_found_by_its_token_in_each_state_of_its_life(register: NodeRegister) -> None:
    register.record_intent(entry(1))
    assert register.by_token("token-1") == entry(1)
    running = replace(entry(1), state="running", boot_id="boot", pid=7, started=8)
    register.record_running(running)
    assert register.by_token("token-1") == running
    assert register.in_state("running") == [running]
    register.record_exit(end(1))
    assert register.by_token("token-1") == replace(running, state="ended")
    assert register.in_state("running") == []


def test_a_second_worker_with_the_same_token_is_impossible(register: NodeRegister) -> None:
    register.record_intent(entry(1))
    with pytest.raises(sqlite3.IntegrityError):
        register.record_intent(replace(entry(2), token="token-1"))


def test_only_a_worker_that_never_ran_can_be_forgotten(register: NodeRegister) -> None:
    register.record_intent(entry(1))
    register.record_intent(entry(2))
    register.record_running(replace(entry(2), pid=7))
    register.forget_intent("task-1")
    register.forget_intent("task-2")
    assert register.by_token("token-1") is None
    assert register.by_token("token-2") is not None


def test_the_first_reason_of_a_stop_stays(register: NodeRegister) -> None:
    register.record_intent(entry(1))
    register.record_stopping("task-1", "first")
    register.record_stopping("task-1", "second")
    task = register.by_token("token-1")
    assert task is not None
    assert task.stop_reason == "first"


def test_all_of_it_is_still_there_when_the_file_is_opened_again(path: Path) -> None:
    with closing(NodeRegister(path)) as first:
        first.record_intent(entry(1))
        number = first.record_exit(end(1))
        log = first.log
    with closing(NodeRegister(path)) as second:
        assert second.log == log
        assert second.exits_after(0) == [(number, end(1))]
        assert second.by_token("token-1") is not None


def test_numbers_grow_and_are_never_used_twice(path: Path) -> None:
    with closing(NodeRegister(path, kept=2)) as register:
        for number in range(1, 6):
            register.record_intent(entry(number))
            assert register.record_exit(end(number)) == number
        assert [number for number, _ in register.exits_after(0)] == [4, 5]
        assert [task.task_id for task in register.in_state("ended")] == ["task-4", "task-5"]
    with closing(NodeRegister(path)) as register:
        assert register.record_exit(end(6)) == 6


def test_ends_are_read_in_order_after_a_number_and_up_to_a_limit(register: NodeRegister) -> None:
    for number in range(1, 8):
        register.record_exit(end(number))
    assert [number for number, _ in register.exits_after(3, limit=2)] == [4, 5]
    assert register.exits_after(7) == []


def test_a_new_register_has_a_new_log(tmp_path: Path) -> None:
    with (
        closing(NodeRegister(tmp_path / "a.db")) as first,
        closing(NodeRegister(tmp_path / "b.db")) as second,
    ):
        assert first.log != second.log


@pytest.mark.parametrize(
    "content", [b"this is no database, and long enough to be read as one" * 20]
)
def test_a_file_that_is_not_a_register_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(NodeStateUnreadable, match=r"register\.db") as refused:
        NodeRegister(path)
    # While the error is here, nothing but a close has closed it.
    assert str(path) not in [file.path for file in psutil.Process().open_files()], refused


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NodeStateUnreadable, match=r"away/register\.db"):
        NodeRegister(tmp_path / "away" / "register.db")


def test_a_register_of_a_later_release_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as later:
        later.execute("PRAGMA user_version = 99")
    with pytest.raises(NodeStateUnreadable, match="schema 99"):
        NodeRegister(path)
