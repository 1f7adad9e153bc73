"""What our images hold: nothing of the machine that built them, nor of the system that runs
them."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.lab.worker_image import ROOT
from tests.support.systems.docker import HUNGRY_IMAGE, DockerEnvironment
from tests.support.systems.local import RunningSystem
from tests.support.systems.secrets import read_stack_secrets
from tests.support.systems.trading import find_task_id

CANARY = "canary-of-the-builder"
#: Our rooms.
CODE = {"worker_runtime", "workflows", "activities", "api", "infra"}
#: What may lie in the folder of somebody who builds an image.
PLANTED = [
    ".env",
    ".git/config",
    ".berth/keys/master.key",
    ".secrets/postgres_password",
    "tests/test_planted.py",
    "infra/.env",
    "infra/local/.env.production",
    "api/.berth/keys/signing.key",
    "worker_runtime/admin.key",
    "infra/lab/planted.py",
    "infra/certificate.pem",
    "activities/.git",
    "workflows/core",
    "workflows/core.123",
    "infra/notes.log",
    "worker_runtime/.secrets/berth_valkey_url",
    "infra/aws/terraform.tfstate",
]


def layers(docker: DockerEnvironment, tag: str, folder: Path) -> Iterator[dict[str, bytes]]:
    """The files of each layer of an image and, as the last one, what describes it."""
    saved = folder / "image.tar"
    command = ["docker", "save", "--output", str(saved), tag]
    subprocess.run(
        command, env={**os.environ, "DOCKER_HOST": docker.daemon.host}, check=True, timeout=120
    )
    described = {}
    with tarfile.open(saved) as archive:
        for blob in archive:
            file = archive.extractfile(blob) if blob.isfile() else None
            if file is None:
                continue
            content = file.read()
            try:
                with tarfile.open(fileobj=io.BytesIO(content)) as layer:
                    files = (member for member in layer if member.isreg())
                    yield {
                        file.name: read.read()
                        for file in files
                        if (read := layer.extractfile(file))
                    }
            except tarfile.ReadError:
                described[blob.name] = content
    yield described


def needed(room: str) -> Iterator[Path]:
    """The files of a room that a server needs: code, and the data that pyproject.toml packs with
    it."""
    yield from (ROOT / room).rglob("*.py")
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]
    for package, patterns in packed["package-data"].items():
        if package.partition(".")[0] == room:
            for pattern in patterns:
                yield from (ROOT / package.replace(".", "/")).glob(pattern)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's folder with what somebody left in it."""
    tree = tmp_path_factory.mktemp("tree")
    unwanted = shutil.ignore_patterns(
        ".git", ".venv", ".berth", ".*_cache", ".hypothesis", "__pycache__"
    )
    shutil.copytree(ROOT, tree, ignore=unwanted, dirs_exist_ok=True)
    for name in PLANTED:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(CANARY, encoding="utf-8")
    return tree


@pytest.mark.parametrize("image", ["server", "worker"])
def test_nothing_that_somebody_left_in_the_folder_gets_into_an_image(
    docker_environment: DockerEnvironment, tree: Path, tmp_path: Path, image: str
) -> None:
    """Docker copies what the real Dockerfile names and `.dockerignore` allows; the packages are
    left out."""
    text = (ROOT / "infra" / "images" / f"{image}.Dockerfile").read_text(encoding="utf-8")
    text = text.replace("\\\n", " ")  # a line that continues in the next one
    copies = re.findall(r"^COPY (?!--from).+$", text, re.M)
    file = tree / "infra" / f"only-{image}.Dockerfile"
    file.write_text("\n".join(["FROM scratch", "WORKDIR /src", *copies]), encoding="utf-8")
    tag = f"berth-copied-{image}:test"
    environment = {
        **os.environ,
        "DOCKER_HOST": docker_environment.daemon.host,
        "DOCKER_BUILDKIT": "0",
    }
    command = ["docker", "build", "--quiet", "-t", tag, "-f", str(file), str(tree)]
    subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True)
    contents = {
        name: content
        for layer in layers(docker_environment, tag, tmp_path)
        for name, content in layer.items()
    }
    assert [name for name, content in contents.items() if CANARY.encode() in content] == []
    # All of our code and its data is there, and no other room.
    copied = {
        name.removeprefix("src/")
        for name in contents
        if name.startswith(("src/", "opt/berth/room/"))
    }
    rooms = {"worker_runtime"} if image == "worker" else CODE
    tracked = (path.relative_to(ROOT) for room in rooms for path in needed(room))
    expected = {str(path) for path in tracked if path.parts[:2] != ("infra", "lab")}
    assert len(expected) > 40
    assert {name.removeprefix("opt/berth/room/") for name in copied} >= expected
    assert {
        name.partition("/")[0] for name in copied if "/" in name and not name.startswith("opt/")
    } <= CODE


def test_neither_the_workers_image_nor_what_docker_shows_of_one_holds_a_secret_of_the_system(
    system: RunningSystem, docker_environment: DockerEnvironment, tmp_path: Path
) -> None:
    own = read_stack_secrets(system)
    task_id = find_task_id(system, system.start_until_active(system.trader())["worker_id"])
    pid = docker_environment.pid_of(task_id)
    places = {"inspect": str(docker_environment.inspect(task_id)).encode()}
    for name in ("environ", "cmdline"):
        places[name] = Path(f"/proc/{pid}/{name}").read_bytes()
    for path in Path(f"/proc/{pid}", "root", "tmp").rglob("*"):
        if path.is_file():
            places[str(path)] = path.read_bytes()
    for number, layer in enumerate(layers(docker_environment, HUNGRY_IMAGE, tmp_path)):
        ours = {name: content for name, content in layer.items() if "site-packages" not in name}
        places |= {f"{number}:{name}": content for name, content in ours.items()}
        rooms = {name.split("/")[3] for name in ours if name.startswith("opt/berth/room/")}
        assert rooms <= {"worker_runtime"}
        assert not [
            name for name in ours if re.search(r"(^|/)(\.git|\.env|\.berth|\.secrets)(/|$)", name)
        ]
    assert any(name.endswith("worker_runtime/__main__.py") for name in places)
    forms = {name: (key, key.hex().encode()) for name, key in own.items()}
    leaks = [
        (place, name)
        for place, content in places.items()
        for name in own
        if any(map(content.__contains__, forms[name]))
    ]
    assert leaks == []
