"""An operator runs this before and with `compose.yaml`: secret files, the profile, Docker Compose
itself."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infra.compose import secret_files
from tests.support.systems.compose_file import ROOT


def test_secret_files_match_what_compose_mounts_and_are_kept(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "compose"
    written = secret_files.write(folder)
    mounted = {Path(entry["file"]) for entry in compose["secrets"].values()}
    assert {secret_files.FOLDER / path.name for path in written} == mounted
    assert folder.stat().st_mode & 0o777 == 0o700
    before = {path: path.read_text() for path in written}
    assert secret_files.write(folder) == []
    assert {path: path.read_text() for path in written} == before


def test_an_installation_of_the_first_release_gets_the_files_of_the_owners_role(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "compose"
    kept = {path: path.read_text() for path in secret_files.write(folder)}
    for name in secret_files.ADDED:
        (folder / name).unlink()
    assert {path.name for path in secret_files.write(folder)} == secret_files.ADDED
    assert {path for path, text in kept.items() if path.read_text() != text} == {
        folder / name for name in secret_files.ADDED
    }
    password = (folder / "berth_owner_password").read_text().strip()
    assert f"//berth_owner:{password}@postgres" in (folder / "berth_database_owner_url").read_text()


def test_an_incomplete_folder_of_secrets_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "compose"
    written = secret_files.write(folder)
    written[0].unlink()
    with pytest.raises(FileExistsError, match=written[0].name):
        secret_files.write(folder)


@pytest.mark.needs("compose command")
@pytest.mark.parametrize("profile", ["containers", "processes", "containers,ui", "processes,ui"])
def test_docker_accepts_the_file(tmp_path: Path, profile: str) -> None:
    """Docker Compose needs no daemon for this."""
    done = subprocess.run(
        [
            shutil.which("docker") or "",
            "compose",
            "--file",
            str(ROOT / "compose.yaml"),
            "config",
            "--quiet",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "COMPOSE_PROFILES": profile},
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.needs("compose command")
def test_without_a_profile_compose_says_what_to_run(tmp_path: Path) -> None:
    words = [
        shutil.which("docker") or "",
        "compose",
        "--file",
        str(ROOT / "compose.yaml"),
        "config",
        "--quiet",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "COMPOSE_PROFILES"}
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode != 0
    assert "python3 infra/compose/secret_files.py" in done.stderr


def test_the_profile_is_written_once_and_an_edited_one_stays(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("BERTH_MAIL_HOST=mail.example\n", encoding="utf-8")
    secret_files.choose_profile(file)
    secret_files.choose_profile(file)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["BERTH_MAIL_HOST=mail.example", "COMPOSE_PROFILES=containers"]
    assert len([line for line in lines if line.startswith("COMPOSE_PROFILES")]) == 1


def test_what_is_mounted_can_be_read_though_the_clone_was_made_for_its_owner_only(
    tmp_path: Path,
) -> None:
    for name in ("a.sh", "b.yaml", "c.conf", "d.key"):
        (tmp_path / name).touch(0o600)
    secret_files.open_mounted(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"a.sh": 0o644, "b.yaml": 0o644, "c.conf": 0o644, "d.key": 0o600}
