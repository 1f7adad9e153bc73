"""What some tests need that pip does not install, and how a run says what it could not run without
it.

A test names its need with `@pytest.mark.needs("browser")`, a fixture or module with
`require("containers")`. Where the need is not met, the test is skipped, and the end of the run has
a line for it: `NOT RUN: ...`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

from infra.lab import docker, worker_image
from infra.lab.bench.starvation.cpu_group import cpu_group
from worker_runtime.process.cgroup import LimitsUnavailable, find_groups

ROOT = Path(__file__).resolve().parents[2]
#: Characters of a line about what was not run.
_LINE_MAX = 400
_GET_DOCKER = "run `bash infra/lab/get_docker.sh .venv/bin/python` as root"


def server_program(name: str) -> str | None:
    """Returns a program of the PATH, or of the folder `sbin` next to a `bin` there, where Debian
    has what only administrators start."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    siblings = [str(folder.with_name("sbin")) for folder in folders if folder.name == "bin"]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(siblings))


def _without_server(program: str, package: str) -> str:
    missing = f"{program} is not installed; install Debian's package {package}"
    return "" if server_program(program) else missing


def _without(program: str, remedy: str) -> str:
    return "" if shutil.which(program) else f"{program} is not installed; {remedy}"


def _why_no_compose_command() -> str:
    client = shutil.which("docker")
    if client is None:
        return f"docker is not installed; {_GET_DOCKER}"
    done = subprocess.run(
        [client, "compose", "version"], capture_output=True, check=False, timeout=30
    )
    return f"this docker has no plugin `compose`; {_GET_DOCKER}" if done.returncode else ""


def _why_no_containers() -> str:
    reason = docker.why_no_docker() or worker_image.why_not_buildable()
    return reason and f"{reason}; {_GET_DOCKER}"


def _why_no_compose_project() -> str:
    if reason := _why_no_containers():
        return reason
    missing = [name for name in ("unshare", "ip", "iptables") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}; {_GET_DOCKER}"
    return _why_no_compose_command()


def _why_no_history() -> str:
    git = shutil.which("git")
    if git is None:
        return "git is not installed; install Debian's package git"
    words = [git, "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        return "this tree is no git clone; clone the repository"
    return (
        "this clone is shallow; run `git fetch --unshallow`"
        if done.stdout.strip() == "true"
        else ""
    )


def _why_no_memory_limits() -> str:
    try:
        find_groups("berth-probe").close()
    except LimitsUnavailable as error:
        return error.detail
    return ""


def _why_no_cpu_quotas() -> str:
    try:
        with cpu_group(f"berth-probe-{os.getpid()}", 100):
            return ""
    except LimitsUnavailable as error:
        return error.detail


def _why_no_network_namespaces() -> str:
    if shutil.which("unshare") is None:
        return "unshare is not installed; install Debian's package util-linux"
    for words in (["unshare", "--net", "true"], ["unshare", "--user", "--net", "true"]):
        if subprocess.run(words, capture_output=True, check=False, timeout=30).returncode == 0:
            return ""
    return "this host allows no network namespaces; run as root, or allow user namespaces"


@dataclass(frozen=True)
class Need:
    #: The tests that have it, as the line names them.
    tests: str
    #: Returns why it is not met here and what to do; empty: it is met.
    why_not: Callable[[], str]


NEEDS = {
    "browser": Need(
        "operators' pages in a browser",
        lambda: _without("chromium", "install Debian's package chromium"),
    ),
    "compose": Need("compose.yaml under a Docker engine", _why_no_compose_project),
    "compose command": Need("compose.yaml read by Docker Compose", _why_no_compose_command),
    "containers": Need("workers in real containers", _why_no_containers),
    "cpu quotas": Need("benches under a CPU quota", _why_no_cpu_quotas),
    "history": Need("the former release next to this one", _why_no_history),
    "memory limits": Need("memory limits of worker processes", _why_no_memory_limits),
    "network namespaces": Need("Shioaji's SDK without a network", _why_no_network_namespaces),
    "nginx": Need("the API behind nginx", lambda: _without_server("nginx", "nginx-light")),
    "pgbouncer": Need(
        "PostgreSQL behind PgBouncer", lambda: _without_server("pgbouncer", "pgbouncer")
    ),
    "promtool": Need(
        "alert rules of Prometheus",
        lambda: _without("promtool", "install Debian's package prometheus"),
    ),
    "root": Need(
        "workers and strangers under user ids of their own",
        lambda: (
            "" if os.geteuid() == 0 else "only root can give processes other user ids; run as root"
        ),
    ),
    "shioaji": Need(
        "the adapter of Shioaji's SDK",
        lambda: (
            "" if find_spec("shioaji") else "the package shioaji is not installed; run `make setup`"
        ),
    ),
}


@cache
def why_not(name: str) -> str:
    """Why a need is not met here; empty: it is met. Raises KeyError for a name that `NEEDS` does
    not have."""
    return NEEDS[name].why_not()


def skip(name: str, reason: str) -> NoReturn:
    """Skips the test, or the module that is being imported."""
    pytest.skip(f"{NEEDS[name].tests}: {reason}", allow_module_level=True)


def require(name: str) -> None:
    """Skips the test, or the module that is being imported, unless the need is met."""
    if reason := why_not(name):
        skip(name, reason)


def require_marked(item: pytest.Item) -> None:
    """Skips a test unless all needs are met that it is marked with."""
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            require(name)


def lines_of(reports: Iterable[pytest.CollectReport | pytest.TestReport]) -> list[str]:
    """A line for each reason for which something was skipped."""
    # Each process of pytest-xdist reports a module that it could not import.
    skipped = {(report.nodeid, _reason_of(report)) for report in reports}
    counts = Counter(reason for _, reason in skipped)
    return [f"NOT RUN: {reason} (skipped: {count})" for reason, count in sorted(counts.items())]


def _reason_of(report: pytest.CollectReport | pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(reason.removeprefix("Skipped: ").split())[:_LINE_MAX]
