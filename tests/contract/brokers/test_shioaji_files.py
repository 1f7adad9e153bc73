"""What a killed session left in memory is taken away by its successor, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker_runtime.brokers.shioaji.files import SessionFiles, private_folder, remove_stale_folders
from worker_runtime.protocol.launch import MEMORY

ROOT = Path(__file__).parents[3]

#: Several accounts that log in at once, each in a thread of its own, as the first of their process.
_FIRST_LOGINS = """
import shutil, tempfile, threading, time
from worker_runtime.brokers.shioaji.files import session_files
make, found = tempfile.mkdtemp, []
def make_slowly(**words):
    time.sleep(0.2)
    return make(**words)
tempfile.mkdtemp = make_slowly
def log_in():
    found.append(session_files().folder)
threads = [threading.Thread(target=log_in) for _ in range(2)]
for one in threads: one.start()
for one in threads: one.join()
for one in set(found): shutil.rmtree(one)
raise SystemExit(len(set(found)) - 1)
"""


def _dead_process() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_folders_of_dead_siblings_are_swept_and_those_of_the_living_stay(tmp_path: Path) -> None:
    family, dead = f"berth-sj-{os.getppid()}-", _dead_process()
    stale_folder = tmp_path / f"{family}{dead}-abc"
    stale_folder.mkdir()
    (stale_folder / "token").write_text("secret")
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


def test_accounts_that_log_in_at_once_share_one_folder() -> None:
    # With two, the end of one account's session emptied the folder in which the other's had its
    # token.
    done = subprocess.run([sys.executable, "-c", _FIRST_LOGINS], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_a_folder_that_was_cleaned_away_is_made_again_and_misses_nobody() -> None:
    """Found by a chaos run: a sweep of /dev/shm took it from a session that lived on."""
    files = SessionFiles()
    folder = Path(files.folder)
    try:
        files.session_opened()
        folder.rmdir()
        files.session_closed()  # no error
        files.session_opened()
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "token").write_text("secret")
        files.session_opened()
        files.session_closed()
        assert (folder / "token").exists()
        files.session_closed()
        assert list(folder.iterdir()) == []
    finally:
        folder.rmdir()


def test_what_another_user_has_put_in_its_place_is_refused(tmp_path: Path) -> None:
    files = SessionFiles()
    folder = Path(files.folder)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    try:
        with pytest.raises(FileExistsError):
            files.session_opened()
    finally:
        folder.unlink()
