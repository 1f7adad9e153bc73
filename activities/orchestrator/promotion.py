"""The build id of an orchestrator's code, and its promotion to the current version.

Different workflow code must have different build ids, or one version would replay the other's
histories; the same code must keep its id after a restart. So the id is the release and a hash of
all code that a replay depends on. At its start an orchestrator makes its version the current one if
it is newer, or if nobody else serves.
"""

import asyncio
import hashlib
import re
import time
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path

import structlog
from temporalio.service import RPCError

import workflows
from activities.orchestrator.deployment import Deployment, DeploymentSnapshot
from worker_runtime import protocol
from worker_runtime.protocol.errors import BerthError

#: The packages that a replay depends on: the workflows, and the messages and errors of the protocol
#: that they use. Activities are left out: a replay takes their results from the history.
REPLAYED_PACKAGES = (workflows, protocol)

_RELEASE = re.compile(r"(\d+(?:\.\d+)*)(?:-|$)")


class CodeUnreadable(BerthError, code="CODE_UNREADABLE"):
    """The source files of the workflows are not there, so that no build id can be made of them."""


def build_id() -> str:
    """Returns `<release>-<hash>`, like `0.1.0-4f0c2b9d8e71`. Raises `CodeUnreadable`."""
    folders = [Path(package.__path__[0]) for package in REPLAYED_PACKAGES]
    return f"{version('berth')}-{code_hash(folders)}"


def code_hash(folders: list[Path]) -> str:
    """Returns twelve hexadecimal digits of a hash of all Python files in these folders, their names
    included."""
    digest = hashlib.sha256()
    for folder in folders:
        files = sorted(folder.rglob("*.py"))
        if not files:
            raise CodeUnreadable(f"no Python files in {folder}; set BERTH_BUILD_ID")
        for file in files:
            name = f"{folder.name}/{file.relative_to(folder).as_posix()}"
            content = file.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()[:12]


def release_of(build: str) -> tuple[int, ...] | None:
    """Returns the release in a build id, comparable; None when an operator chose another form."""
    match = _RELEASE.match(build)
    return tuple(int(part) for part in match[1].split(".")) if match else None


#: Seconds between two tries until the first poll of our own workers has reached the server (it took
#: 0.1 s).
POLL_INTERVAL_S = 0.05
#: Seconds between two tries after Temporal refused or failed.
RETRY_INTERVAL_S = 0.5
#: Seconds between two log lines about the same trouble.
WARN_INTERVAL_S = 5.0

log = structlog.get_logger()


class Promotion:
    """`decided` is set when this process has promoted its version, or decided not to."""

    def __init__(self, deployment: Deployment, *, promotes: bool, queues: Collection[str]) -> None:
        self._deployment = deployment
        self._wanted = promotes
        #: The versioned queues that this process polls.
        self._queues = queues
        self._warned_at = 0.0
        self.decided = asyncio.Event()

    async def run(self) -> None:
        """Returns when it is decided. Our workers must poll already: that registers the version."""
        while not self.decided.is_set():
            try:
                pause = await self._try()
            except RPCError as error:
                self._warn("promotion_failed", reason=str(error)[:200])
                pause = RETRY_INTERVAL_S
            if pause:
                await asyncio.sleep(pause)
            else:
                self.decided.set()

    async def _try(self) -> float:
        """Tries to decide; returns the seconds until the next try, 0 if decided."""
        own = self._deployment.build
        seen = await self._deployment.describe()
        if (
            seen is None
            or own not in seen.versions
            or not await self._deployment.serves(self._queues)
        ):
            self._warn("version_not_registered", build=own)
            return POLL_INTERVAL_S
        if seen.current == own:
            return 0.0
        if not self._wanted:
            log.info("not_promoted", build=own, current=seen.current, reason="an operator promotes")
        elif is_newer(seen, own) or not await self._deployment.served(
            await self._deployment.running(build=seen.current, limit=20)
        ):
            await self._deployment.make_current(seen)
            log.info("promoted", build=own, before=seen.current)
        else:
            log.info(
                "not_promoted",
                build=own,
                current=seen.current,
                reason="the current version is newer",
            )
        return 0.0

    def _warn(self, event: str, **fields: str) -> None:
        """Logs at intervals; not at first, because the first try usually comes before the first
        poll."""
        now = time.monotonic()
        if not self._warned_at:
            self._warned_at = now
        elif now - self._warned_at >= WARN_INTERVAL_S:
            self._warned_at = now
            log.warning(event, **fields)


def is_newer(seen: DeploymentSnapshot, own: str) -> bool:
    """Compares releases; of two builds of one release, the one that was seen first is older.

    So a restart of an old build next to a newer one changes nothing, and a developer's last edit
    wins.
    """
    if seen.current not in seen.versions:
        return True
    ours, theirs = release_of(own), release_of(seen.current)
    if ours is not None and theirs is not None and ours != theirs:
        return ours > theirs
    return seen.versions[own] > seen.versions[seen.current]
