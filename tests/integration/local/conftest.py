"""Makes a data folder, and the environment in which the local stack starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.process import free_ports
from infra.settings import LocalSettings
from tests.support.systems.processes import wait_nothing_left


@pytest.fixture
def folder(short_directory: Path) -> Iterator[Path]:
    """A data folder to be, that other users may pass through (PostgreSQL refuses to run as
    root)."""
    short_directory.chmod(0o755)
    path = short_directory / "data"
    yield path
    wait_nothing_left(path)


#: What a developer's shell may hold for other programs. No library of the local system may see it.
FOREIGN_VARIABLES = {
    "TEMPORAL_ADDRESS": "10.255.255.1:7233",
    "TEMPORAL_NAMESPACE": "of-another-project",
    "TEMPORAL_API_KEY": "of-another-project",
    "TEMPORAL_PROFILE": "cloud",
    "TEMPORAL_TLS": "true",
    "PGHOST": "10.255.255.1",
    "PGPORT": "1",
    "PGUSER": "somebody",
    "PGPASSWORD": "of-another-database",
    "PGDATABASE": "another",
    "PGSERVICE": "missing",
    "PGSSLMODE": "verify-full",
    "PGTARGETSESSIONATTRS": "standby",
    "PGOPTIONS": "-c no.such=1 --no-such-option",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "http_proxy": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "ALL_PROXY": "socks5://127.0.0.1:9",
    "OPENSSL_CONF": "/nonexistent",
    "WEB_CONCURRENCY": "7",
    "FORWARDED_ALLOW_IPS": "*",
    "PYTHONOPTIMIZE": "2",
    "LC_ALL": "C",
}


@pytest.fixture
def port_environment(folder: Path) -> dict[str, str]:
    """An environment in which `berth up` uses free ports and no setting of the caller's.

    It is full of variables for other programs.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    fields = [name for name in LocalSettings.model_fields if name.endswith("_port")]
    names = ["BERTH_API_PORT", *(f"BERTH_LOCAL_{name.upper()}" for name in fields)]
    ports = {name: str(port) for name, port in zip(names, free_ports(len(names)), strict=True)}
    return (
        own
        | FOREIGN_VARIABLES
        | ports
        | {"BERTH_DATA_DIR": str(folder), "BERTH_API_PROCESSES": "1", "NO_COLOR": "1"}
    )
