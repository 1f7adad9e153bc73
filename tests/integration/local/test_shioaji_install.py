"""`make setup` and images install the broker's SDK, also when the index no longer has the pinned
release."""

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
