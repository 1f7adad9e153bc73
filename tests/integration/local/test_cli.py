from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from infra.local.stack import SEARCH_ATTRIBUTES
from workflows import names

BERTH = str(Path(sys.executable).with_name("berth"))


def _berth(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "NO_COLOR": "1", "COLUMNS": "200", **more}
    return subprocess.run([BERTH, *words], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    "words",
    [
        *((), ("up",), ("down",), ("keys",), ("keys", "init"), ("keys", "rotate")),
        *(("bench",), ("bench", "claim"), ("bench", "order"), ("bench", "memory"), ("bench", "all")),
        *(("chaos",), ("chaos", "orders")),
        *(("exchange",), ("node",), ("api",), ("orchestrator",)),
        *(("worker", name) for name in ("list", "show", "start", "stop", "resume", "timeline", "run")),
        *(("worker",), ("worker", "reload-credentials")),
    ],
)
def test_every_command_explains_itself(words: tuple[str, ...]) -> None:
    done = _berth(*words, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["exchange", "node", "api", "orchestrator", "worker run"])
def test_the_usage_of_a_server_is_what_one_types(name: str) -> None:
    assert f"usage: berth {name}" in _berth(*name.split(), "--help").stdout.lower()


@pytest.mark.parametrize("name", ["api", "orchestrator", "worker run"])
def test_a_server_without_options_refuses_a_word_too_many(name: str) -> None:
    assert _berth(*name.split(), "--port").returncode == 2


def test_the_help_names_every_part() -> None:
    found = _berth("--help").stdout
    for name in ("up", "down", "api", "orchestrator", "worker", "exchange", "node", "keys", "bench", "chaos"):
        assert f" {name} " in found


def test_the_version_is_the_packages() -> None:
    assert _berth("--version").stdout.strip() == f"berth {version('berth')}"


def test_help_loads_no_server_library() -> None:
    code = (
        "import sys; from infra.cli.app import main; "
        "print(*{'pydantic', 'temporalio', 'sqlalchemy', 'fastapi', 'redis', 'httpx', 'cryptography'}"
        " & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_keys_init_makes_keys_where_the_settings_say(tmp_path: Path) -> None:
    places = {
        "BERTH_MASTER_KEY_FILE": str(tmp_path / "keys" / "m.key"),
        "BERTH_MASTER_PUBLIC_FILE": str(tmp_path / "keys" / "m.pub"),
        "BERTH_ORCHESTRATOR_KEY_FILE": str(tmp_path / "keys" / "o.key"),
    }
    assert _berth("keys", "init", **places).stdout.count("made ") == 3
    assert "all key files exist" in _berth("keys", "init", **places).stdout
    (tmp_path / "keys" / "m.key").unlink()
    refused = _berth("keys", "init", **places)
    assert refused.returncode == 1
    assert "m.key is missing" in refused.stderr


def test_down_without_a_data_folder_says_so(tmp_path: Path) -> None:
    done = _berth("down", "--data", str(tmp_path / "none"))
    assert done.returncode == 0
    assert "nothing runs" in done.stdout
    assert not (tmp_path / "none").exists()


def test_down_works_on_a_damaged_folder_so_that_make_clean_can_remove_it(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / "version").write_text("")
    done = _berth("down", "--data", str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_the_stack_registers_the_search_attributes_of_the_workflows() -> None:
    assert SEARCH_ATTRIBUTES == names.SEARCH_ATTRIBUTES
