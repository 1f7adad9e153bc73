from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from infra.local.stack import SEARCH_ATTRIBUTES
from tests.support.commands import CommandForker, Finished
from workflows import names

BERTH = str(Path(sys.executable).with_name("berth"))
Berth = Callable[..., Finished]


@pytest.fixture
def berth(commands: CommandForker) -> Berth:
    """Runs `berth …` with lines as long as they want to be."""
    return partial(commands.run, COLUMNS="200")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("up",),
        ("down",),
        ("keys",),
        ("keys", "init"),
        ("keys", "rotate"),
        ("bench",),
        ("bench", "claim"),
        ("bench", "order"),
        ("bench", "memory"),
        ("bench", "all"),
        ("chaos",),
        ("chaos", "orders"),
        ("exchange",),
        ("node",),
        ("api",),
        ("orchestrator",),
        *(
            ("worker", name)
            for name in ("list", "show", "start", "stop", "resume", "timeline", "run")
        ),
        ("worker",),
        ("worker", "reload-credentials"),
    ],
)
def test_every_command_explains_itself(berth: Berth, words: tuple[str, ...]) -> None:
    done = berth(*words, "--help")
    assert done.code == 0, done.err
    assert "usage" in done.out.lower()
    assert done.err == ""


@pytest.mark.parametrize("name", ["exchange", "node", "api", "orchestrator", "worker run"])
def test_the_usage_of_a_server_is_what_one_types(berth: Berth, name: str) -> None:
    assert f"usage: berth {name}" in berth(*name.split(), "--help").out.lower()


@pytest.mark.parametrize("name", ["api", "orchestrator", "worker run"])
def test_a_server_without_options_refuses_a_word_too_many(berth: Berth, name: str) -> None:
    assert berth(*name.split(), "--port").code == 2


def test_the_help_names_every_part(berth: Berth) -> None:
    help_text = berth("--help").out
    for name in (
        "up",
        "down",
        "api",
        "orchestrator",
        "worker",
        "exchange",
        "node",
        "keys",
        "bench",
        "chaos",
    ):
        assert f" {name} " in help_text


def test_the_version_is_the_packages() -> None:
    done = subprocess.run([BERTH, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"berth {version('berth')}"


def test_help_loads_no_server_library() -> None:
    code = (
        "import sys; from infra.cli.app import main; "
        "print(*{'pydantic', 'temporalio', 'sqlalchemy', 'fastapi', 'redis', 'httpx', "
        "'cryptography'}"
        " & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_keys_init_makes_keys_where_the_settings_say(berth: Berth, tmp_path: Path) -> None:
    places = {
        "BERTH_MASTER_KEY_FILE": str(tmp_path / "keys" / "m.key"),
        "BERTH_MASTER_PUBLIC_FILE": str(tmp_path / "keys" / "m.pub"),
        "BERTH_ORCHESTRATOR_KEY_DIR": str(tmp_path / "keys"),
        "BERTH_MESSAGE_KEY_FILE": str(tmp_path / "keys" / "message.key"),
        "BERTH_API_SECRET_FILE": str(tmp_path / "keys" / "api.key"),
    }
    made = {
        Path(line.removeprefix("made ")).name
        for line in berth("keys", "init", **places).out.splitlines()
    }
    orchestrators = {"signing.key", "launch.key", "budget.key"}
    assert made == {"m.key", "m.pub", "message.key", "api.key"} | orchestrators
    assert "all key files exist" in berth("keys", "init", **places).out
    (tmp_path / "keys" / "m.key").unlink()
    refused = berth("keys", "init", **places)
    assert refused.code == 1
    assert "m.key is missing" in refused.err


@pytest.mark.parametrize(
    "program", ["doctor", "keys init", "worker list", "up", "-m api", "-m activities"]
)
def test_a_setting_that_is_not_valid_is_one_sentence(
    berth: Berth, tmp_path: Path, program: str
) -> None:
    wrong = {"BERTH_LOG_LEVEL": "loud canary", "BERTH_DATA_DIR": str(tmp_path / "none")}
    if program.startswith("-m"):
        command = [sys.executable, *program.split()]
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | wrong
        )
        done = Finished(ended.returncode, ended.stdout, ended.stderr)
    else:
        done = berth(*program.split(), **wrong)
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(r"error: BERTH_LOG_LEVEL: String should match pattern '.*'\n", done.err)
    assert not (tmp_path / "none").exists()


def test_down_without_a_data_folder_says_so(berth: Berth, tmp_path: Path) -> None:
    done = berth("down", "--data", str(tmp_path / "none"))
    assert done.code == 0
    assert "nothing runs" in done.out
    assert not (tmp_path / "none").exists()


def test_down_works_on_a_damaged_folder_so_that_make_clean_can_remove_it(
    berth: Berth, tmp_path: Path
) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / "version").write_text("")
    done = berth("down", "--data", str(tmp_path))
    assert done.code == 0, done.err


def test_the_stack_registers_the_search_attributes_of_the_workflows() -> None:
    assert SEARCH_ATTRIBUTES == names.SEARCH_ATTRIBUTES
