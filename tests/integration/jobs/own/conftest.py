"""One runner with its fork server for all tests of a module: each start costs half a second."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from infra.local.servers import ValkeyServer
from tests.support.jobs.application import NAME, PACKAGES, Application


@pytest.fixture(scope="session")
def manifest() -> bytes:
    """The manifest of the package, as a deployment gets it."""
    command = [
        sys.executable,
        "-m",
        "berth_jobs.discovery",
        "--application",
        NAME,
        "--import",
        "shop_jobs",
    ]
    environment = {**os.environ, "PYTHONPATH": PACKAGES}
    return subprocess.run(command, capture_output=True, check=True, env=environment).stdout


@pytest.fixture(scope="module")
def shop(
    valkey_server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory, manifest: bytes
) -> Iterator[Application]:
    """An application with one runner of eight slots."""
    import shutil
    import tempfile
    from pathlib import Path

    folder = Path(tempfile.mkdtemp(prefix="berth-shop-"))
    application = Application(valkey_server.url, folder)
    application.load_types(manifest)
    application.start()
    yield application
    application.close()
    if "BERTH_KEEP" not in os.environ:
        shutil.rmtree(folder)
