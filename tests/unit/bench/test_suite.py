"""A benchmark whose aim is missed fails: its exit code, what it prints, and what it writes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from infra.cli.app import app
from infra.lab import figures
from infra.lab.bench import cli, measured
from infra.lab.bench.aims import Aim, NotMeasured, Result
from infra.lab.bench.suite import BENCHMARKS, Benchmark, run_benchmarks

SECONDS = Aim("a pass (s)", 3, lambda result: result["seconds"])
RATE = Aim("passes a second", 10, lambda result: result["rate"], least=True)


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def benchmark(*aims: Aim, **result: float) -> Benchmark:
    """Returns a benchmark that measures these figures."""

    def table(result: dict[str, Any]) -> None:
        figures.print_table("passes: a table", [("a pass", f"{result['seconds']} s")])

    return Benchmark(
        run=lambda: dict(result), table=table, aims=aims or (SECONDS, RATE), is_long=False
    )


def test_every_command_runs_a_benchmark_that_can_fail() -> None:
    commands = {command.name for command in cli.app.registered_commands} - {"all"}
    assert commands == set(BENCHMARKS)
    assert all(each.aims for each in BENCHMARKS.values())


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_an_aim_that_is_just_missed_is_exit_code_1_and_one_that_is_just_met_is_0(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the aims that each command has: the figure is the limit, and a thousandth beyond it."""
    for aim in BENCHMARKS[name].aims:
        beyond = aim.limit - 0.001 if aim.least else aim.limit + 0.001
        for figure, code in ((aim.limit, 0), (beyond, 1)):
            exact = aim._replace(figure=lambda _, figure=figure: figure)  # type: ignore[misc]
            made = Benchmark(run=lambda: {}, table=lambda _: None, aims=(exact,), is_long=False)
            assert run_benchmarks({name: {}}, benchmarks={name: made}) == code
            assert (f"missed: {name}: {aim.what}" in capsys.readouterr().err) == bool(code)


def test_a_missed_aim_keeps_no_later_benchmark_from_running(tmp_path: Path) -> None:
    made = {"first": benchmark(seconds=4, rate=11), "second": benchmark(seconds=2, rate=11)}
    assert (
        run_benchmarks({"first": {}, "second": {}}, tmp_path / "figures.json", benchmarks=made) == 1
    )
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [aim["met"] for aim in written["first"]["aims"]] == [False, True]
    assert [aim["met"] for aim in written["second"]["aims"]] == [True, True]


def test_an_aim_that_the_options_left_out_is_shown_as_not_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def left_out(result: Result) -> float:
        raise NotMeasured("rate")

    made = {"passes": benchmark(SECONDS, RATE._replace(figure=left_out), seconds=2)}
    assert run_benchmarks({"passes": {}}, benchmarks=made) == 0
    assert "not measured" in capsys.readouterr().out


def test_an_aim_without_a_figure_is_exit_code_1_and_a_sentence(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"passes": benchmark(seconds=2)}  # its result has no `rate`
    code = run_benchmarks({"passes": {}}, update_docs=True, benchmarks=made, root=checkout)
    assert code == 1
    assert (
        "missed: passes: passes a second: at least 10, but the result has no such figure"
        in capsys.readouterr().err
    )
    page = (checkout / measured.PAGE).read_text()
    assert "| passes a second | at least 10 | no figure | **missed** |" in page


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Makes a repository with a page, all of it committed."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "code.py").write_text("one = 1\n")
    page = "# Measured\n\n## Passes\n\n<!-- berth bench passes -->\nold\n<!-- end -->\n\nText.\n"
    (tmp_path / measured.PAGE).write_text(page)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "state"]):
        subprocess.run([*git, *words], check=True)
    return tmp_path


def test_figures_go_to_the_page_with_command_commit_date_machine_and_aims(checkout: Path) -> None:
    made = {"passes": benchmark(seconds=4, rate=11)}
    command = "berth bench passes"
    code = run_benchmarks(
        {"passes": {}}, command=command, update_docs=True, benchmarks=made, root=checkout
    )
    assert code == 1  # it is written down that the aim was missed
    page = (checkout / measured.PAGE).read_text()
    assert "| a pass | 4 s |" in page
    assert "| a pass (s) | at most 3 | 4 | **missed** |" in page
    assert "| passes a second | at least 10 | 11 | met |" in page
    assert "old" not in page
    assert page.endswith("<!-- end -->\n\nText.\n")
    record = measured.read_records(checkout)["passes"]
    assert (
        f"`{command}`, commit `{record['commit']}`, {record['date']}: "
        f"{record['machine']['cores']} cores" in page
    )
    assert measured.render(page, measured.read_records(checkout)) == page
    # Only the page has changed, so that a second benchmark of the same code can be written down,
    # too.
    assert measured.present_commit(checkout) == record["commit"]


def test_code_that_is_not_committed_has_no_commit_to_name(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "code.py").write_text("one = 2\n")
    made = {"passes": benchmark(seconds=1, rate=11)}
    assert run_benchmarks({"passes": {}}, update_docs=True, benchmarks=made, root=checkout) == 1
    assert "Commit your changes first" in capsys.readouterr().err
    assert "old" in (checkout / measured.PAGE).read_text()


def test_a_benchmark_without_a_place_on_the_page_is_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"others": benchmark(seconds=1, rate=11)}
    assert run_benchmarks({"others": {}}, update_docs=True, benchmarks=made, root=checkout) == 1
    assert "no place for others" in capsys.readouterr().err


def test_the_command_of_a_record_does_not_say_where_its_figures_go() -> None:
    argv = [
        "berth",
        "bench",
        "maintenance",
        "--workers",
        "10000,20000",
        "--json",
        "figures.json",
        "--update-docs",
    ]
    assert cli._command(argv) == "berth bench maintenance --workers 10000,20000"
    assert cli._command(["/usr/bin/berth", "bench", "claim", "--json=x"]) == "berth bench claim"


@pytest.mark.parametrize("words", [["--peers", "/srv/peers"], ["--peers=/srv/peers"]])
def test_the_command_of_a_record_names_no_folder_of_the_machine(words: list[str]) -> None:
    command = cli._command(["/usr/bin/berth", "bench", "jobs", *words])
    assert command.replace("=", " ") == "berth bench jobs --peers FOLDER"


def test_every_command_takes_the_option() -> None:
    click_app = typer.main.get_command(cli.app)
    for name in (*BENCHMARKS, "all"):
        options = {option for param in click_app.commands[name].params for option in param.opts}  # type: ignore[attr-defined]
        assert {"--json", "--update-docs"} <= options, name
    assert CliRunner().invoke(app, ["bench", "--help"]).exit_code == 0
