"""`make setup` installs into `.venv`, whatever pip is told for other projects. It and images
install the broker's SDK, also when the index no longer has the pinned release."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from infra.local.process import free_port
from tests.support.commands import ROOT

SCRIPT = ROOT / "infra" / "images" / "install_shioaji.py"
PINNED, NEWER = "1.7.9", "1.7.12"


def wheel(version: str) -> bytes:
    """A package that pip takes for Shioaji."""
    content = io.BytesIO()
    folder = f"shioaji-{version}.dist-info"
    files = {
        "shioaji.py": "",
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: shioaji\nVersion: {version}\n",
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: "
        "py3-none-any\n",
        f"{folder}/RECORD": "".join(
            f"{folder}/{name},,\n" for name in ("METADATA", "WHEEL", "RECORD")
        ),
    }
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return content.getvalue()


class PackageIndex(ThreadingHTTPServer):
    """A package index on 127.0.0.1 with these releases of Shioaji, and nothing else."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _IndexHandler)
        self.wheels: dict[str, bytes] = {}
        self.is_broken = False
        self.url = f"http://127.0.0.1:{self.server_port}/simple"

    def publish(self, *versions: str) -> None:
        self.wheels = {
            f"shioaji-{version}-py3-none-any.whl": wheel(version) for version in versions
        }


class _IndexHandler(BaseHTTPRequestHandler):
    server: PackageIndex

    def do_GET(self) -> None:
        name = self.path.rstrip("/").rpartition("/")[2]
        if self.server.is_broken:
            self.send_error(503)
        elif name == "shioaji" and self.server.wheels:
            links = "".join(
                f'<a href="/files/{file}">{file}</a><br>' for file in self.server.wheels
            )
            self._answer("text/html", f"<!DOCTYPE html><html><body>{links}</body></html>".encode())
        elif name in self.server.wheels:
            self._answer("application/octet-stream", self.server.wheels[name])
        else:
            self.send_error(404)

    def _answer(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """The index says nothing."""


class SetupFolder:
    """A folder with `pyproject.toml`, a lock that pins `PINNED`, and an environment of its own."""

    def __init__(self, folder: Path, index: PackageIndex) -> None:
        self.folder = folder
        self.index = index
        self.python = folder / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.pin(hashlib.sha256(wheel(PINNED)).hexdigest())

    def pin(self, digest: str) -> None:
        text = f"shioaji=={PINNED} \\\n    --hash=sha256:{digest}\n    # via -r -\n"
        (self.folder / "requirements-shioaji.lock").write_text(text, encoding="utf-8")

    def install(self, *arguments: str, index_url: str = "") -> subprocess.CompletedProcess[str]:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PIP_")
        }
        environment |= {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": index_url or self.index.url,
            "PIP_RETRIES": "0",
            "PIP_NO_CACHE_DIR": "1",
        }
        words = [str(self.python), str(SCRIPT), *arguments]
        return subprocess.run(
            words,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )

    def version(self) -> str:
        """What is installed; empty: nothing."""
        code = "import importlib.metadata as m; print(m.version('shioaji'))"
        done = subprocess.run(
            [self.python, "-c", code], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()


@pytest.fixture(scope="module")
def index() -> Iterator[PackageIndex]:
    with PackageIndex() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def shared_checkout(tmp_path_factory: pytest.TempPathFactory, index: PackageIndex) -> SetupFolder:
    return SetupFolder(tmp_path_factory.mktemp("checkout"), index)


@pytest.fixture
def checkout(shared_checkout: SetupFolder) -> SetupFolder:
    """Nothing is installed, and the index works."""
    shared_checkout.index.is_broken = False
    shared_checkout.pin(hashlib.sha256(wheel(PINNED)).hexdigest())
    pip = [str(shared_checkout.python), "-m", "pip", "uninstall", "--quiet", "--yes", "shioaji"]
    subprocess.run(pip, check=True, capture_output=True)
    return shared_checkout


@pytest.mark.parametrize("mode", ["fallback", "pinned"])
def test_the_pinned_release_is_installed_by_its_hash_without_a_word(
    checkout: SetupFolder, mode: str
) -> None:
    checkout.index.publish("1.7.8", PINNED, NEWER, "1.8.0", "1.7.13rc1")
    done = checkout.install(mode)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert checkout.version() == PINNED


def test_where_the_pinned_release_is_gone_the_newest_of_its_line_is_installed_with_a_loud_line(
    checkout: SetupFolder,
) -> None:
    checkout.index.publish("1.7.11", NEWER, "1.8.0", "1.7.13rc1")
    done = checkout.install()
    assert done.returncode == 0
    assert f"SHIOAJI: {NEWER} IS INSTALLED WITHOUT A HASH, IN PLACE OF {PINNED}" in done.stderr
    assert checkout.version() == NEWER
    # It stays with the next setup, and the pinned release comes back when the index has it again.
    assert checkout.install().returncode == 0
    assert checkout.version() == NEWER
    checkout.index.publish(PINNED, NEWER)
    assert checkout.install().stderr == ""
    assert checkout.version() == PINNED


@pytest.mark.parametrize(
    "versions", [(), ("1.7.8", "1.8.0")], ids=["no package", "other lines only"]
)
def test_where_no_release_can_be_used_nothing_is_installed_with_a_loud_line(
    checkout: SetupFolder, versions: tuple[str, ...]
) -> None:
    checkout.index.publish(*versions)
    done = checkout.install()
    assert done.returncode == 0
    assert "SHIOAJI: NOT INSTALLED" in done.stderr
    assert "Paper trading works" in done.stderr
    assert checkout.version() == ""


def test_an_image_that_takes_only_the_pinned_release_fails_without_it(
    checkout: SetupFolder,
) -> None:
    checkout.index.publish(NEWER)
    done = checkout.install("pinned")
    assert done.returncode == 1
    assert f"the package index has no shioaji {PINNED}" in done.stderr
    assert checkout.version() == ""


def test_no_sdk_is_installed_when_nobody_wants_it(checkout: SetupFolder) -> None:
    checkout.index.publish(PINNED)
    assert checkout.install("none").returncode == 0
    assert checkout.version() == ""


def test_an_index_that_cannot_be_reached_is_an_error_and_no_reason_for_another_release(
    checkout: SetupFolder,
) -> None:
    checkout.index.publish(NEWER)
    checkout.index.is_broken = True
    for url in (f"http://127.0.0.1:{free_port()}/simple", checkout.index.url):
        done = checkout.install(index_url=url)
        assert done.returncode == 1
        assert "error: Shioaji could not be installed" in done.stderr
        assert "Could not fetch URL" in done.stderr
        assert checkout.version() == ""


def test_a_file_with_another_hash_is_an_error(checkout: SetupFolder) -> None:
    checkout.index.publish(PINNED, NEWER)
    checkout.pin("0" * 64)
    done = checkout.install()
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert checkout.version() == ""


def test_wheels_in_a_folder_are_enough(checkout: SetupFolder, tmp_path: Path) -> None:
    """How images are built without a network, and from a copy that one keeps."""
    (tmp_path / f"shioaji-{PINNED}-py3-none-any.whl").write_bytes(wheel(PINNED))
    done = checkout.install("pinned", "--no-index", f"--find-links={tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert checkout.version() == PINNED


#: Builds what `make setup` installs as editable, without anything else.
BACKEND = """
import pathlib, tomllib, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    here = pathlib.Path.cwd()
    name = tomllib.loads((here / "pyproject.toml").read_text())["project"]["name"]
    info = f"{name}-1.dist-info"
    file = f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory, file), "w") as archive:
        archive.writestr(f"{name}.pth", str(here))
        metadata = f"Metadata-Version: 2.1\\nName: {name}\\nVersion: 1\\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return file
"""


def small_checkout(folder: Path) -> Path:
    """Makes a checkout with the Makefile, whose distributions are empty and whose only locked
    package is the SDK."""
    digest = hashlib.sha256(wheel(PINNED)).hexdigest()
    for part in (".", "infra/client", "infra/berth_jobs", "infra/berth_testing"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        name = "main" if part == "." else part.rpartition("/")[2]
        (folder / part / "backend.py").write_text(BACKEND, encoding="utf-8")
        (folder / part / "pyproject.toml").write_text(
            "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
            f"[project]\nname = '{name}'\nversion = '1'\n"
            "[project.optional-dependencies]\nshioaji = ['shioaji>=1.7.9,<1.8']\n",
            encoding="utf-8",
        )
    for lock in ("requirements.lock", "requirements-shioaji.lock"):
        (folder / lock).write_text(f"shioaji=={PINNED} --hash=sha256:{digest}\n", encoding="utf-8")
    (folder / "infra" / "images").mkdir()
    shutil.copy(SCRIPT, folder / "infra" / "images")
    shutil.copy(ROOT / "Makefile", folder)
    return folder


@pytest.mark.timeout(180)
def test_a_pip_configuration_for_other_projects_does_not_break_setup(
    index: PackageIndex, tmp_path: Path
) -> None:
    """Its index stays: nothing could be installed without it. Nor do a variable of the shell and
    a copy of the checkout break it."""
    index.is_broken = False
    index.publish(PINNED)
    elsewhere = tmp_path / "elsewhere"
    configuration = tmp_path / "pip.conf"
    configuration.write_text(
        f"[global]\nindex-url = {index.url}\nretries = 0\nno-cache-dir = true\n"
        f"[install]\nuser = true\ntarget = {elsewhere}\nprefix = {elsewhere}\n"
        f"root = {elsewhere}\nno-deps = true\nrequire-hashes = true\ndry-run = true\n",
        encoding="utf-8",
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))
    }
    environment |= {"PIP_CONFIG_FILE": str(configuration), "PIP_USER": "1"}
    make = shutil.which("make")
    assert make is not None
    first = small_checkout(tmp_path / "a checkout")

    def set_up(folder: Path) -> None:
        done = subprocess.run(
            [make, "setup", f"PYTHON={sys.executable}"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        code = "import sys, backend, importlib.metadata as m; print(sys.prefix, backend.__file__, "
        asked = [
            str(folder / ".venv" / "bin" / "python"),
            "-c",
            f"{code}m.version('shioaji'), sep='|')",
        ]
        answer = subprocess.run(
            asked, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        prefix, module, version = answer.stdout.strip().split("|")
        assert (prefix, version) == (str(folder / ".venv"), PINNED)
        assert Path(module).is_relative_to(folder)

    set_up(first)
    copy = tmp_path / "copy"
    shutil.copytree(first, copy, symlinks=True)
    set_up(copy)
    assert not elsewhere.exists()
