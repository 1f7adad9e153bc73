"""The build id is the same for the same code, and another one for any other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from activities.orchestrator import promotion


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "workflows"
    (made / "inner").mkdir(parents=True)
    (made / "one.py").write_text("x = 1\n")
    (made / "inner" / "two.py").write_text("y = 2\n")
    return made


def test_it_names_the_release_and_is_the_same_at_every_start() -> None:
    assert promotion.build_id() == promotion.build_id()
    assert promotion.release_of(promotion.build_id()) is not None


def test_a_copy_elsewhere_has_the_same_hash(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere" / "workflows"
    shutil.copytree(folder, copied)
    (copied / "__pycache__").mkdir()
    (copied / "__pycache__" / "one.pyc").write_bytes(b"compiled")
    assert promotion.code_hash([copied]) == promotion.code_hash([folder])


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "inner" / "two.py").write_text("y = 3\n"),
        lambda folder: (folder / "three.py").write_text(""),
        lambda folder: (folder / "one.py").rename(folder / "uno.py"),
        lambda folder: (folder / "one.py").unlink(),
    ],
    ids=["edited", "added", "renamed", "removed"],
)
def test_every_change_of_the_code_changes_the_hash(folder: Path, change: object) -> None:
    before = promotion.code_hash([folder])
    assert callable(change)
    change(folder)
    assert promotion.code_hash([folder]) != before


def test_without_source_files_it_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(promotion.CodeUnreadable, match="BERTH_BUILD_ID"):
        promotion.code_hash([tmp_path])


@pytest.mark.parametrize(
    ("given", "release"),
    [("0.1.0-4f0c", (0, 1, 0)), ("1.12", (1, 12)), ("b7", None), ("0.1.0rc1", None), ("", None)],
)
def test_the_release_is_read_where_there_is_one(
    given: str, release: tuple[int, ...] | None
) -> None:
    assert promotion.release_of(given) == release
