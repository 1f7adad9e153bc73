"""Workers on Fargate: a container that runs before them hands over the key of their launch
documents."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infra.launchers.ecs.request import run_task
from infra.settings import EcsSettings
from infra.worker_task import LaunchSpec
from tests.support.launchers.ecs_environment import KEY
from tests.support.launchers.ecs_on_moto import CONTAINER, FAMILY, EcsOnMoto
from tests.support.launchers.worker_specs import spec
from worker_runtime.process import config
from worker_runtime.protocol import launch_document

TASK = Path(__file__).resolve().parents[4] / "infra/images/fargate_task.json"


def definition() -> dict[str, Any]:
    task_definition: dict[str, Any] = json.loads(TASK.read_text(encoding="utf-8"))
    return task_definition


def container(name: str) -> dict[str, Any]:
    return next(
        container for container in definition()["containerDefinitions"] if container["name"] == name
    )


def hand_over(folder: Path, secret: str) -> Path:
    """Runs the first container's command as it stands there, in a folder and for a user of the
    test's."""
    (command,) = container("key")["command"]
    (folder / "tmp").mkdir()
    for there, here in [
        (" /tmp", f" {folder / 'tmp'}"),
        ("/run/berth", str(folder)),
        ("10002", str(os.getuid())),
    ]:
        assert there in command
        command = command.replace(there, here)
    environment = {"PATH": os.environ["PATH"], "LAUNCH_KEY": secret}
    subprocess.run(
        [*container("key")["entryPoint"], command], env=environment, check=True, timeout=30
    )
    return folder / Path(config.DEFAULT_KEY_FILE).name


def test_the_worker_opens_its_document_with_the_key_that_was_handed_over(tmp_path: Path) -> None:
    place = EcsSettings(cluster="c", placement="none")
    asked: LaunchSpec = spec("w-1")
    (override,) = run_task(place, asked, "token-1", KEY)["overrides"]["containerOverrides"]
    assert override["name"] == container("worker")["name"]
    given = {variable["name"]: variable["value"] for variable in override["environment"]}
    # As `openssl rand -base64 64` writes it: in two lines.
    key_file = hand_over(tmp_path, base64.encodebytes(KEY).decode())
    assert key_file.stat().st_mode & 0o777 == 0o600
    document = config.read_launch_document({**given, launch_document.KEY_FILE: str(key_file)})
    assert json.loads(document)["worker_id"] == "w-1"


def test_the_worker_waits_for_the_key_and_cannot_change_it() -> None:
    key, worker = container("key"), container("worker")
    assert worker["dependsOn"] == [{"containerName": "key", "condition": "SUCCESS"}]
    assert not key["essential"]
    assert worker["essential"]
    assert "secrets" not in worker
    mounts = {mount["containerPath"]: mount for mount in worker["mountPoints"]}
    folder = str(Path(config.DEFAULT_KEY_FILE).parent)
    assert mounts[folder]["readOnly"]
    written = {mount["containerPath"]: mount["sourceVolume"] for mount in key["mountPoints"]}
    assert written[folder] == mounts[folder]["sourceVolume"]


def test_ecs_takes_the_task_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    with EcsOnMoto() as aws:
        # Boto3 knows the fields.
        made = aws.ecs.register_task_definition(**definition())["taskDefinition"]
    assert made["family"] == FAMILY
    assert {container["name"] for container in made["containerDefinitions"]} == {"key", CONTAINER}
    assert made["requiresCompatibilities"] == ["FARGATE"]
