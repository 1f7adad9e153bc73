"""A worker's log never fills the disk."""

from __future__ import annotations

import os
from pathlib import Path

from infra.node.worker import WorkerLogs


def test_a_long_log_is_cut_while_its_worker_keeps_writing(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path / "logs", cap=100)
    output = logs.open("w-1")
    os.write(output, b"a" * 50 + b"b" * 100)
    logs.sweep({"w-1"})
    os.write(output, b"after")
    os.close(output)
    assert (tmp_path / "logs" / "w-1.log").read_bytes() == b"after"
    assert (tmp_path / "logs" / "w-1.log.1").read_bytes() == b"b" * 100


def test_a_short_log_is_left_alone(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path / "logs", cap=100)
    os.close(logs.open("w-1"))
    (tmp_path / "logs" / "w-1.log").write_bytes(b"x" * 100)
    logs.sweep(set())
    assert (tmp_path / "logs" / "w-1.log").read_bytes() == b"x" * 100


def test_a_worker_launched_again_appends_to_its_log(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path / "logs")
    for text in (b"first\n", b"second\n"):
        output = logs.open("w-1")
        os.write(output, text)
        os.close(output)
    assert (tmp_path / "logs" / "w-1.log").read_bytes() == b"first\nsecond\n"


def test_the_oldest_logs_of_the_dead_go_first_and_those_of_the_living_stay(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path / "logs", cap=1, kept=2)
    for age, name in enumerate(["newest", "newer", "older", "oldest", "living"]):
        os.close(logs.open(name))
        os.utime(tmp_path / "logs" / f"{name}.log", (1e9 - age, 1e9 - age))
    (tmp_path / "logs" / "oldest.log.1").touch()
    logs.sweep({"living"})
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "newest.log",
        "newer.log",
        "living.log",
    }


def test_a_folder_of_logs_that_was_removed_is_made_again(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path / "logs")
    (tmp_path / "logs").rmdir()
    output = logs.open("w-1")
    os.write(output, b"line\n")
    os.close(output)
    assert (tmp_path / "logs" / "w-1.log").read_bytes() == b"line\n"


def test_a_worker_whose_log_cannot_be_opened_is_started_without_one(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path / "logs")
    (tmp_path / "logs").rmdir()
    (tmp_path / "logs").write_text("a file in its place")
    output = logs.open("w-1")
    assert os.write(output, b"line\n") == 5
    os.close(output)
