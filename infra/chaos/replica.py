"""A replica of Valkey that lagged: the server comes back as it was, out of its append-only file."""

from __future__ import annotations

import shutil
from pathlib import Path

from infra.local.servers import ValkeyServer

_LOG, _COPY = "appendonlydir", "lagging"


def copy(valkey: ValkeyServer) -> Path | None:
    """What the server knows now; None if it could not be copied."""
    made = valkey.directory / _COPY
    shutil.rmtree(made, ignore_errors=True)
    try:
        shutil.copytree(valkey.directory / _LOG, made)
    except (OSError, shutil.Error):  # it was being rewritten
        return None
    return made


def promote(valkey: ValkeyServer, made: Path) -> None:
    """Kills the server and puts the copy in the place of its data; the generation stays the same. The caller
    starts it."""
    log = valkey.directory / _LOG
    valkey.kill()
    shutil.rmtree(log)
    made.rename(log)
