from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from infra.local.folder import DataFolder, FolderBusy, FolderUnusable


def test_a_folder_whose_holder_is_stopping_says_so(folder: Path) -> None:
    with closing(DataFolder(folder).open()) as holder:
        holder.note_stop()
        assert DataFolder(folder).holder() == os.getpid()
        with pytest.raises(
            FolderBusy, match=f"pid {os.getpid()}.* is stopping .*; start again in a moment"
        ):
            DataFolder(folder).open()
    with closing(DataFolder(folder).open()) as opened, pytest.raises(FolderBusy, match="Ctrl-C"):
        DataFolder(opened.path).open()


def test_a_folder_is_open_once_and_names_its_holder(folder: Path) -> None:
    with closing(DataFolder(folder).open()):
        assert DataFolder(folder).holder() == os.getpid()
        with pytest.raises(FolderBusy, match=f"pid {os.getpid()}.*--data"):
            DataFolder(folder).open()
    assert DataFolder(folder).holder() is None
    with closing(DataFolder(folder).open()):
        pass


def test_the_lock_ends_with_a_killed_holder(folder: Path) -> None:
    code = (
        "import os, sys, signal; from pathlib import Path; from infra.local.folder import "
        "DataFolder;"
        "kept = DataFolder(Path(sys.argv[1])).open(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    assert done.returncode == -9
    with closing(DataFolder(folder).open()):
        assert (folder / "version").exists()


def test_a_folder_with_other_things_is_refused_and_left_untouched(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(FolderUnusable, match=r"thesis\.tex"):
        DataFolder(folder).open()
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_a_folder_whose_making_was_cut_short_is_completed(folder: Path) -> None:
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "version.new").write_text('{"lay')
    with closing(DataFolder(folder).open()) as opened:
        assert opened.keys.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("text", "reason"),
    [('{"layout": 99}', "another layout"), ("", "damaged"), ('{"x": 1}', "damaged")],
)
def test_a_folder_of_another_layout_or_with_a_damaged_version_is_refused(
    folder: Path, text: str, reason: str
) -> None:
    folder.mkdir()
    (folder / "version").write_text(text)
    with pytest.raises(FolderUnusable, match=reason):
        DataFolder(folder).open()


def test_a_path_that_is_no_folder_is_refused_with_the_setting_to_change(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(FolderUnusable, match="BERTH_DATA_DIR"):
        DataFolder(folder).open()


def test_too_little_disk_space_is_reported_before_anything_is_written(folder: Path) -> None:
    with pytest.raises(FolderUnusable, match="MiB are needed"):
        DataFolder(folder, min_free=2**62).open()
    assert not (folder / "version").exists()
    with closing(DataFolder(folder).open()):
        pass
