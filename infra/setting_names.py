"""Finds variables named `BERTH_…` that nothing reads: mistyped, or removed by a release.

Each process that reads `Settings` warns of them at its start, and `berth doctor` names them. They
end nothing: an upgrade that removes a setting must not stop trading.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import structlog

from infra.settings import SECRETS_DIR, EcsSettings, LocalSettings, Settings

PREFIX = "BERTH_"

#: Read by something else than the settings: by whom → names without the prefix.
OTHER_VARIABLES: Mapping[str, frozenset[str]] = {
    "the settings themselves, to find secret files": frozenset({"SECRETS_DIR"}),
    "programs that call Berth, such as those with `berth_client` or `berth_jobs`": frozenset(
        {"URL", "ADMIN_KEY", "API_KEY"}
    ),
    "workers on ECS (`worker_runtime/protocol/launch_document.py`)": frozenset(
        {"LAUNCH_DOCUMENT", "LAUNCH_WORKER", "LAUNCH_KEY_FILE"}
    ),
    "compose.yaml": frozenset(
        {
            "BROKERS",
            "DOCKER_GROUP",
            "JOBS_IMAGE",
            "LOG_FILES",
            "LOG_SIZE",
            "NODE_CGROUP",
            "NODE_CGROUP_PARENT",
            "WORKERS_INTERNAL",
        }
    ),
    "tests, and images that benchmarks build": frozenset(
        {
            "FAILED_TESTS",
            "CHAOS_MINUTES",
            "CHAOS_SEED",
            "DRILL_GAP",
            "FENCING_ROUNDS",
            "FENCING_SEED",
            "FENCING_USERS",
            "FUZZ_EXAMPLES",
            "IMAGE_CACHE",
            "KEEP",
            "KEEP_CHAOS",
            "OUTAGE_SECONDS",
            "SCREENSHOTS",
            "TEST_WORKERS",
            "USERS_FLEET",
        }
    ),
}


@dataclass(frozen=True)
class RemovedSetting:
    """A setting of an earlier release."""

    #: The last release that read it.
    last_release: str
    #: A sentence that says what applies now.
    now: str


#: Names without the prefix. The reasons are in docs/adr/0022-settings-that-were-removed.md.
REMOVED_SETTINGS: Mapping[str, RemovedSetting] = {
    "CHECK_UNPRICED": RemovedSetting(
        "0.1.0", "Where an order has no price, the broker's reference price counts."
    ),
    "JOBS_EVENTS_TO": RemovedSetting(
        "0.1.0", "The log has the same lines; a log shipper sends them to a collector."
    ),
    "MAINTENANCE_CONFIRM": RemovedSetting(
        "0.1.0",
        "Two passes of maintenance that confirm an anomaly are BERTH_MARK_TTL and 10 s apart.",
    ),
    "MOVE_PERIOD": RemovedSetting(
        "0.1.0", "Orchestrators look for workflows of another version every 15 s."
    ),
    "MOVE_RATE": RemovedSetting("0.1.0", "20 workflows a second move to the current version."),
    "SWEEP_LEASE": RemovedSetting(
        "0.1.0", "Orders of a sweeper that died are taken over after 10 s."
    ),
    "VERIFY_LONGEST_PAUSE": RemovedSetting(
        "0.1.0",
        "An order that is followed is checked at least every 60 s, or every BERTH_ABSENT_AFTER "
        "if that is shorter.",
    ),
    "VERIFY_PAUSE": RemovedSetting(
        "0.1.0", "An order that is followed is checked after 2 s for the first time."
    ),
    "WATCH_CONFIRM": RemovedSetting(
        "0.1.0", "The watcher acts when a mark has been missing for 5 s."
    ),
    "WATCH_PERIOD": RemovedSetting("0.1.0", "The watcher looks at all marks every 2 s."),
}

#: The variables that Kubernetes and Docker set for a service named `berth-…`.
_SERVICE_LINK = re.compile(
    r"_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?|ENV_\w+)"
)
#: The value of `BERTH_VALKEY_PORT` where such a service is named `berth-valkey`.
_LINK_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
#: An assignment in a file such as `.env`.
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?(BERTH_\w+)\s*=", re.MULTILINE)


@dataclass(frozen=True)
class UnreadVariable:
    """A variable that nothing reads."""

    name: str
    #: The setting with the most similar name; empty if none is similar.
    nearest: str = ""
    removed: RemovedSetting | None = None

    def __str__(self) -> str:
        if self.removed:
            return (
                f"{self.name} is no setting any more since the release after "
                f"{self.removed.last_release}. {self.removed.now} Remove the variable."
            )
        if self.nearest:
            return f"{self.name} is not a setting. Did you mean {self.nearest}?"
        return f"{self.name} is not a setting. Remove the variable."


def known_names() -> frozenset[str]:
    """Returns every variable with our prefix that something reads."""
    return _setting_names() | {
        f"{PREFIX}{name}" for names in OTHER_VARIABLES.values() for name in names
    }


def find_unread(names: Iterable[str]) -> list[UnreadVariable]:
    """Returns those of the names that begin with our prefix and that nothing reads, sorted."""
    ours = {name.upper() for name in names if name.upper().startswith(PREFIX)}
    return [
        _describe(name) for name in sorted(ours - known_names()) if not _SERVICE_LINK.search(name)
    ]


def unread_variables() -> list[UnreadVariable]:
    """Returns the variables of this process, and its secret files, that nothing reads.

    A secret file that a variable names, such as that of a password, is read under its path.
    """
    named = set(os.environ.values())
    files = [name for name in _files_in(SECRETS_DIR) if str(SECRETS_DIR / name) not in named]
    variables = [name for name, value in os.environ.items() if not _LINK_ADDRESS.match(value)]
    return find_unread([*variables, *files])


def unread_in_file(path: Path) -> list[UnreadVariable]:
    """Returns what a file such as `.env` assigns and nothing reads; nothing if there is no such
    file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return find_unread(_ASSIGNMENT.findall(text))


def log_unread_variables() -> None:
    """Logs a warning for each variable of this process that nothing reads."""
    log = structlog.get_logger()
    for variable in unread_variables():
        if variable.removed:
            log.warning(
                "setting_removed",
                setting=variable.name,
                last_release=variable.removed.last_release,
                now=variable.removed.now,
            )
        else:
            log.warning("setting_unknown", setting=variable.name, nearest=variable.nearest)


def print_unread_variables() -> None:
    """Writes a warning for each variable of this process that nothing reads to standard error."""
    for variable in unread_variables():
        sys.stderr.write(f"warning: {variable}\n")


def _setting_names() -> frozenset[str]:
    return frozenset(
        f"{model.model_config['env_prefix']}{field}".upper()
        for model in (Settings, LocalSettings, EcsSettings)
        for field in model.model_fields
    )


def _describe(name: str) -> UnreadVariable:
    if removed := REMOVED_SETTINGS.get(name.removeprefix(PREFIX)):
        return UnreadVariable(name, removed=removed)
    # Without the prefix, which would make all names similar.
    settings = [setting.removeprefix(PREFIX) for setting in _setting_names()]
    nearest = get_close_matches(name.removeprefix(PREFIX), settings, n=1, cutoff=0.75)
    return UnreadVariable(name, nearest=f"{PREFIX}{nearest[0]}" if nearest else "")


def _files_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # there is no such folder, or it is not ours
        return []
