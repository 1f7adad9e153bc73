"""A run of CI takes the drills of what changed, and a quarter of the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drills import (
    DRILLS,
    RECENT_COMMITS,
    ROTATION_PARTS,
    DrillGroup,
    History,
    choose_drills,
    divide,
    drill_of,
    read_history,
)

ROOT = Path(__file__).resolve().parents[2]
FEW = tuple(
    DrillGroup(f"d{number}", (f"tests/d{number}/",), (f"src/{number}/",), 10) for number in range(8)
)
YEAR = "tests/workflow/days/test_year.py"


class Checkout:
    """Holds a small repository."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *words: str) -> None:
        identity = (
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@example.com",
            "-c",
            "commit.gpgsign=false",
        )
        subprocess.run(
            ["git", *identity, *words],  # noqa: S607 - whichever git the machine has
            cwd=self.path,
            check=True,
            capture_output=True,
        )

    def write(self, path: str, text: str = "") -> None:
        file = self.path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def commit(self, path: str, text: str = "") -> None:
        self.write(path, text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", path)

    def commit_nothing(self, times: int) -> None:
        for _ in range(times):
            self.git("commit", "--quiet", "--allow-empty", "--message", "nothing")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


def test_each_drill_of_the_table_has_its_tests_and_its_paths() -> None:
    paths = [path for drill in DRILLS for path in (*drill.tests, *drill.about)]
    assert [path for path in paths if not (ROOT / path.partition("::")[0]).exists()] == []
    named = [entry.split("::") for drill in DRILLS for entry in drill.tests if "::" in entry]
    assert [test for path, test in named if f"def {test}(" not in (ROOT / path).read_text()] == []
    assert len({drill.name for drill in DRILLS}) == len(DRILLS)


def test_a_changed_path_makes_its_drill_run_and_no_other() -> None:
    choice = choose_drills(History(0, frozenset({"src/3/deep/file.py", "README.md"})), FEW)
    due = {name for name, part in divide(FEW).items() if part == 0}
    assert set(choice.taken) == due | {"d3"}
    assert choice.taken["d3"] == "src/3/deep/file.py changed in the last 20 commits"
    assert set(choice.left_out) == {drill.name for drill in FEW} - due - {"d3"}


def test_a_changed_test_of_a_drill_makes_it_run() -> None:
    assert "d5" in choose_drills(History(0, frozenset({"tests/d5/test_it.py"})), FEW).taken


@pytest.mark.parametrize("begin", [0, 1, 584])
def test_four_commits_in_a_row_take_each_drill_once(begin: int) -> None:
    runs = [
        choose_drills(History(begin + number, frozenset()), DRILLS)
        for number in range(ROTATION_PARTS)
    ]
    assert sorted(name for run in runs for name in run.taken) == sorted(
        drill.name for drill in DRILLS
    )
    assert all(
        set(run.taken) | set(run.left_out) == {drill.name for drill in DRILLS} for run in runs
    )


def test_the_parts_take_about_equally_long() -> None:
    totals = [0] * ROTATION_PARTS
    for drill in DRILLS:
        totals[divide(DRILLS)[drill.name]] += drill.duration_s
    assert max(totals) - min(totals) <= max(drill.duration_s for drill in DRILLS)


def test_a_drills_part_does_not_depend_on_what_changed_or_on_the_order_of_the_table() -> None:
    assert divide(DRILLS) == divide(tuple(reversed(DRILLS)))


def test_without_a_history_all_drills_run() -> None:
    choice = choose_drills(None, FEW)
    assert set(choice.taken) == {drill.name for drill in FEW}
    assert choice.left_out == {}
    assert "all, since git has no full history here" in next(choice.lines())


def test_the_log_names_each_drill_with_its_reason() -> None:
    choice = choose_drills(History(1, frozenset({"src/0/x.py"})), FEW[:2])
    assert list(choice.lines()) == [
        "drills: part 2 of 4 is due at 1 commits; about 20 s of 20 s run",
        "  runs      d0: src/0/x.py changed in the last 20 commits",
        "  runs      d1: its part, 2, is due",
    ]
    [left_out] = choose_drills(History(0, frozenset()), FEW[:2]).left_out.items()
    assert left_out == ("d1", "its part is 2, and nothing that it is about changed")


def test_a_drill_is_found_by_its_folder_its_module_or_its_test() -> None:
    drills = (
        DrillGroup("test", ("tests/a/test_x.py::test_long",), (), 1),
        DrillGroup("module", ("tests/a/test_x.py",), (), 1),
        DrillGroup("folder", ("tests/b/",), (), 1),
    )
    names = {
        "tests/a/test_x.py::test_long[one]": "test",
        "tests/a/test_x.py::test_longer": "module",
        "tests/b/c/test_y.py::test_y": "folder",
    }
    assert {node_id: getattr(drill_of(node_id, drills), "name", "") for node_id in names} == names
    assert drill_of("tests/a/test_xy.py::test_x", drills) is None


def test_the_history_holds_the_last_commits_and_what_is_not_committed(checkout: Checkout) -> None:
    checkout.commit("old.py")
    checkout.commit("moved.py", "text that git would follow\n" * 20)
    checkout.commit("edited.py")
    checkout.commit_nothing(RECENT_COMMITS - 2)
    checkout.git("mv", "moved.py", "strange näme.py")
    checkout.commit("late.py")
    checkout.write("edited.py", "changed")
    checkout.write("new/untracked.py")
    expected = {"late.py", "moved.py", "strange näme.py", "edited.py", "new/untracked.py"}
    assert read_history(checkout.path) == History(RECENT_COMMITS + 2, frozenset(expected))


def test_changed_texts_of_a_python_file_make_no_drill_run(checkout: Checkout) -> None:
    code = '"""{0}"""\n\n\ndef double(x):\n    """{0}"""\n    return 2 * x  # {0}\n'
    for path in ("texts.py", "code.py", "page.md"):
        checkout.commit(path, code.format("old"))
    checkout.commit_nothing(RECENT_COMMITS)
    checkout.commit("texts.py", code.format("new"))
    checkout.commit("page.md", code.format("new"))
    checkout.commit("code.py", code.format("old").replace("2 *", "3 *"))
    history = read_history(checkout.path)
    assert history is not None
    assert history.changed == {"code.py", "page.md"}


def test_a_change_on_a_merged_branch_counts(checkout: Checkout) -> None:
    checkout.commit("first.py")
    checkout.commit_nothing(RECENT_COMMITS)
    checkout.git("switch", "--quiet", "--create", "branch")
    checkout.commit("branch.py")
    checkout.git("switch", "--quiet", "main")
    checkout.git("merge", "--quiet", "--no-ff", "--message", "merge", "branch")
    history = read_history(checkout.path)
    assert history == History(RECENT_COMMITS + 3, frozenset({"branch.py"}))


def test_a_shallow_clone_has_no_history(checkout: Checkout, tmp_path: Path) -> None:
    checkout.commit_nothing(3)
    shallow = tmp_path / "shallow"
    checkout.git("clone", "--quiet", "--depth", "1", checkout.path.as_uri(), str(shallow))
    assert read_history(shallow) is None


def test_a_folder_without_git_or_without_a_commit_has_no_history(
    checkout: Checkout, tmp_path: Path
) -> None:
    assert read_history(tmp_path) is None
    assert read_history(checkout.path) is None


@pytest.fixture
def suite(checkout: Checkout) -> Checkout:
    """Makes a suite with the drill of a year and one that the table does not know; neither is
    due."""
    checkout.write("conftest.py", "pytest_plugins = ['tests.drills']\n")
    checkout.write("pytest.ini", "[pytest]\nmarkers = drill\naddopts = --strict-markers\n")
    checkout.write(
        "tests/other/test_new.py", "import pytest\n\n@pytest.mark.drill\ndef test_new(): pass\n"
    )
    checkout.commit(
        YEAR,
        "import pytest\n\n@pytest.mark.drill\ndef test_long(): pass\n\ndef test_quick(): pass\n",
    )
    checkout.commit_nothing(RECENT_COMMITS)
    while (history := read_history(checkout.path)) and (
        history.commit_count % ROTATION_PARTS == divide(DRILLS)["year"]
    ):
        checkout.commit_nothing(1)
    return checkout


def run_pytest(suite: Checkout, *options: str) -> str:
    """Returns what pytest printed; the names of the tests that passed are in it."""
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-rA",
            "-p",
            "no:cacheprovider",
            "-p",
            "xdist.plugin",
            *options,
        ],
        cwd=suite.path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.parametrize("processes", ["0", "1"])
def test_pytest_leaves_out_the_drills_that_are_not_due(suite: Checkout, processes: str) -> None:
    printed = run_pytest(suite, "--drills=rotate", "--numprocesses", processes)
    assert f"left out  year: its part is {divide(DRILLS)['year'] + 1}" in printed
    assert "test_quick" in printed
    assert "test_new" in printed, "no entry of the table is about it: it always runs"
    assert "test_long" not in printed


def test_pytest_runs_a_drill_of_what_changed(suite: Checkout) -> None:
    suite.commit("workflows/reports/changed.py")
    assert "test_long" in run_pytest(suite, "--drills=rotate")


def test_pytest_runs_all_drills_unless_the_rotation_is_asked_for(suite: Checkout) -> None:
    assert "test_long" in run_pytest(suite)
