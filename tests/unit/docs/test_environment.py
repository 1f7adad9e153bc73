"""`.env.example` and the settings say the same, and secret files work."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from infra.settings import EcsSettings, LocalSettings, Settings, read_settings
from infra.vault.key_pairs import OrchestratorKey, orchestrator_key_file

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / ".env.example"
#: The program that lists its environment.
ENV = shutil.which("env") or "/usr/bin/env"


def _variables() -> dict[str, str]:
    """Returns name → value of what the recipe in the file itself sets, in an otherwise empty
    environment."""
    done = subprocess.run(
        ["/bin/sh", "-euc", 'set -a; . "$0"; exec "$1" -0', str(EXAMPLE), ENV],
        capture_output=True,
        check=True,
        text=True,
        env={},
    )
    assert done.stderr == ""
    pairs = (entry.split("=", 1) for entry in done.stdout.split("\0") if entry.startswith("BERTH_"))
    return {name: value for name, value in pairs}


def _expected() -> dict[str, tuple[type[BaseSettings], str]]:
    return {
        f"{model.model_config['env_prefix']}{field}".upper(): (model, field)
        for model in (Settings, LocalSettings, EcsSettings)
        for field in model.model_fields
    }


def test_the_example_lists_every_setting_and_no_other() -> None:
    assert set(_variables()) == set(_expected())


def test_every_line_of_the_example_parses_to_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _variables().items():
        monkeypatch.setenv(name, value)
    for model in (Settings, LocalSettings, EcsSettings):
        defaults = {name: field.default for name, field in model.model_fields.items()}
        assert model().model_dump() == defaults


def test_no_two_keys_have_one_default_path() -> None:
    fields = {**Settings.model_fields, **EcsSettings.model_fields}
    paths = [
        field.default for name, field in fields.items() if re.search(r"(key|public)_file$", name)
    ]
    paths += [
        orchestrator_key_file(Settings().orchestrator_key_dir, name) for name in OrchestratorKey
    ]
    named = [str(path) for path in paths if str(path)]
    assert len(set(named)) == len(named), named


@pytest.mark.parametrize(
    ("kind", "variable", "value", "said"),
    [
        (Settings, "BERTH_API_PROCESSES", "0", "Input should be greater than or equal to 1"),
        (
            Settings,
            "BERTH_ALERT_MAILS",
            "canary@example.com",
            "it is not the JSON of a list or object",
        ),
        (EcsSettings, "BERTH_ECS_SUBNETS", "canary", "it is not the JSON of a list or object"),
        (
            LocalSettings,
            "BERTH_LOCAL_UI_PORT",
            "canary",
            "Input should be a valid integer, unable to parse",
        ),
    ],
)
def test_a_setting_that_is_not_valid_ends_the_process_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseSettings], variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as ended:
        read_settings(kind)
    assert str(ended.value).startswith(f"error: {variable}: {said}")
    assert "canary" not in str(ended.value)
    monkeypatch.delenv(variable)
    assert read_settings(kind) == kind()


def test_a_pool_too_small_for_a_close_is_refused() -> None:
    assert Settings(database_pool=2).database_pool == 2
    with pytest.raises(ValidationError):
        Settings(database_pool=1)


def test_every_setting_of_the_example_has_a_comment_above_it_or_its_group() -> None:
    blocks = EXAMPLE.read_text(encoding="utf-8").split("\n\n")
    bare = [
        block
        for block in blocks
        if re.search(r"^BERTH_", block, re.M) and not block.startswith("#")
    ]
    assert bare == []


def test_a_secret_file_replaces_a_variable(tmp_path: Path) -> None:
    (tmp_path / "berth_database_url").write_text(
        "postgresql+asyncpg://berth:hidden@postgres/berth\n"
    )

    class FromFiles(Settings):
        model_config = SettingsConfigDict(env_prefix="BERTH_", secrets_dir=tmp_path)

    assert FromFiles().database_url == "postgresql+asyncpg://berth:hidden@postgres/berth"
