"""What a killed session left in memory is taken away by its successor, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from worker_runtime.brokers.shioaji.files import MEMORY, private_folder, remove_stale_folders


def _dead_process() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_folders_of_dead_siblings_are_swept_and_those_of_the_living_stay(tmp_path: Path) -> None:
    family, dead = f"berth-sj-{os.getppid()}-", _dead_process()
    left = tmp_path / f"{family}{dead}-abc"
    left.mkdir()
    (left / "token").write_text("secret")
    stays = [
        tmp_path / f"{family}{os.getpid()}-abc",  # ours
        tmp_path / f"berth-sj-{os.getppid() + 1}-{dead}-abc",  # another worker's
        tmp_path / f"{family}nonsense",
        tmp_path / "something else",
    ]
    for folder in stays:
        folder.mkdir()
    remove_stale_folders(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(stays)


def test_a_place_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    remove_stale_folders(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_a_private_folder_is_in_memory_and_closed_to_others() -> None:
    folder = Path(private_folder())
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.parent == MEMORY or not os.access(MEMORY, os.W_OK)
        assert f"-{os.getpid()}-" in folder.name
    finally:
        folder.rmdir()
