"""Variables that nothing reads are named, with what to do, and end nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from infra import setting_names
from infra.setting_names import (
    OTHER_VARIABLES,
    REMOVED_SETTINGS,
    find_unread,
    known_names,
    log_unread_variables,
    print_unread_variables,
    unread_in_file,
    unread_variables,
)

ROOT = Path(__file__).resolve().parents[3]
#: How code names a variable, tests read one, and compose files and scripts do.
IN_CODE = re.compile(r'"(BERTH_[A-Z0-9_]*[A-Z0-9])"')
IN_TESTS = re.compile(r'environ(?:\.get\(|\[)"(BERTH_\w+)"')
IN_SHELL = re.compile(r"\$\{(BERTH_\w+)")
#: Variables that tests give to programs of their own.
OF_PROGRAMS_IN_TESTS = {"BERTH_CLOCK", "BERTH_FULL", "BERTH_SNAPSHOTS"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("BERTH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(setting_names, "SECRETS_DIR", tmp_path / "secrets")


def test_a_mistyped_name_is_named_with_the_nearest_setting() -> None:
    [variable] = find_unread(["BERTH_LOG_LEVL", "BERTH_LOG_LEVEL", "PATH"])
    assert str(variable) == "BERTH_LOG_LEVL is not a setting. Did you mean BERTH_LOG_LEVEL?"


def test_a_name_like_no_setting_is_named_without_a_guess() -> None:
    [variable] = find_unread(["BERTH_FOO"])
    assert str(variable) == "BERTH_FOO is not a setting. Remove the variable."


@pytest.mark.parametrize("name", sorted(REMOVED_SETTINGS))
def test_a_removed_setting_is_named_with_its_last_release_and_what_applies_now(name: str) -> None:
    assert f"BERTH_{name}" not in known_names()
    [variable] = find_unread([f"BERTH_{name}"])
    assert REMOVED_SETTINGS[name].last_release in str(variable)
    assert REMOVED_SETTINGS[name].now in str(variable)
    decision = ROOT / "docs" / "adr" / "0022-settings-that-were-removed.md"
    assert f"`BERTH_{name}`" in decision.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    ["BERTH_URL", "BERTH_API_KEY", "BERTH_JOBS_IMAGE", "BERTH_ECS_REGION", "BERTH_LOCAL_UI_PORT"],
)
def test_what_another_program_reads_is_not_named(name: str) -> None:
    assert find_unread([name]) == []


@pytest.mark.parametrize(
    "name",
    [
        "BERTH_API_SERVICE_HOST",
        "BERTH_API_SERVICE_PORT_HTTP",
        "BERTH_VALKEY_PORT_6379_TCP",
        "BERTH_VALKEY_PORT_6379_TCP_ADDR",
    ],
)
def test_what_kubernetes_sets_for_a_service_of_ours_is_not_named(name: str) -> None:
    assert find_unread([name]) == []


def test_the_address_of_a_service_of_ours_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_VALKEY_PORT", "tcp://10.0.0.7:6379")
    assert setting_names.unread_variables() == []
    monkeypatch.setenv("BERTH_VALKEY_PORT", "6379")
    assert [variable.name for variable in setting_names.unread_variables()] == ["BERTH_VALKEY_PORT"]


def test_no_variable_of_another_program_is_a_setting() -> None:
    others = [name for names in OTHER_VARIABLES.values() for name in names]
    assert len(set(others)) == len(others)
    settings = setting_names._setting_names()
    assert [name for name in others if f"BERTH_{name}" in settings] == []


def test_every_variable_that_the_repository_reads_is_known() -> None:
    read: set[str] = set()
    for folder in ("activities", "api", "infra", "worker_runtime", "workflows", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            names = IN_TESTS if folder == "tests" else IN_CODE
            read |= set(names.findall(path.read_text(encoding="utf-8")))
    for path in (ROOT / "compose.yaml", *(ROOT / "infra").rglob("*.sh")):
        read |= set(IN_SHELL.findall(path.read_text(encoding="utf-8")))
    assert {"BERTH_API_KEY", "BERTH_LAUNCH_KEY_FILE", "BERTH_LOG_SIZE"} <= read
    assert read - known_names() - OF_PROGRAMS_IN_TESTS == set()


def test_each_is_logged_as_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_MOVE_RATE", "5")
    monkeypatch.setenv("BERTH_API_PROT", "canary")
    with capture_logs() as logs:
        log_unread_variables()
    assert logs == [
        {
            "event": "setting_unknown",
            "log_level": "warning",
            "setting": "BERTH_API_PROT",
            "nearest": "BERTH_API_PORT",
        },
        {
            "event": "setting_removed",
            "log_level": "warning",
            "setting": "BERTH_MOVE_RATE",
            "last_release": "0.1.0",
            "now": "20 workflows a second move to the current version.",
        },
    ]


def test_a_secret_file_of_no_setting_is_named_unless_a_variable_names_its_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    for name in ("berth_database_url", "berth_database_ulr", "berth_mail_password", "other"):
        (secrets / name).write_text("canary")
    monkeypatch.setenv("BERTH_MAIL_PASSWORD_FILE", str(secrets / "berth_mail_password"))
    assert [variable.name for variable in unread_variables()] == ["BERTH_DATABASE_ULR"]


def test_a_file_such_as_env_is_read_for_names_only(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text(
        "# BERTH_COMMENTED=1\nBERTH_LOG_SIZE=5m\nexport BERTH_WATCH_PERIOD=3\nCOMPOSE_PROFILES=x\n"
    )
    assert [variable.name for variable in unread_in_file(file)] == ["BERTH_WATCH_PERIOD"]
    assert unread_in_file(tmp_path / "missing") == []


def test_they_are_printed_without_their_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BERTH_API_PROT", "canary")
    print_unread_variables()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "warning: BERTH_API_PROT is not a setting. Did you mean BERTH_API_PORT?\n"


def test_the_command_warns_and_does_its_work(tmp_path: Path) -> None:
    berth = str(Path(sys.executable).with_name("berth"))
    done = subprocess.run(
        [berth, "doctor", "settings"],
        capture_output=True,
        check=False,
        text=True,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "BERTH_API_PROT": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "BERTH_API_PROT is not a setting. Did you mean BERTH_API_PORT?" in done.stdout
    assert "warning:" not in done.stderr
    done = subprocess.run(
        [berth, "keys", "init"],
        capture_output=True,
        check=False,
        text=True,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "BERTH_API_PROT": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("BERTH_API_PROT is not a setting") == 1
