"""Real servers for the whole suite: started once, on free ports, each test on data of its own."""

from __future__ import annotations

import asyncio
import asyncio.runners
import contextlib
import faulthandler
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import structlog
from redis.asyncio import Redis
from xdist.remote import Producer

from infra.exchange.hours import time_half_a_day_away
from infra.lab.worker_image import PackagesAbsent
from infra.local.process import ServerFailed
from infra.local.servers import PostgresServer, TemporalServer, ValkeyServer
from infra.valkey import client as valkey
from tests.groups import UnitScheduling, sort_units
from tests.support import needs
from tests.support.asyncio_tasks import all_stacks
from tests.support.commands import ROOT, CommandForker
from tests.support.databases import SERVICES, MigratedDatabases, drop_database
from workflows.names import SEARCH_ATTRIBUTES

if TYPE_CHECKING:
    from tests.support.systems.docker import DockerEnvironment

pytest_plugins = ["tests.drills"]

_numbers = itertools.count(1)

#: Seconds for what a failed test leaves to be ended.
CLEAN_UP = 180.0

#: A file system in memory, and the bytes that a run may put there: it needs a quarter of them.
MEMORY, ROOM = Path("/dev/shm"), 2 << 30  # noqa: S108 - folders in it have names of their own


def keep_data_in_memory() -> None:
    """Puts temporary folders into memory where there is room for them, unless TMPDIR says
    otherwise.

    Servers, the exchange and the node write their data to disk at every commit, which takes 4 ms
    and now and then 30. Tests kill processes, and what these have written outlives them in memory,
    too.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return
    there = os.statvfs(MEMORY)
    if there.f_bavail * there.f_frsize >= ROOM and not there.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


keep_data_in_memory()
# Tests place the same order again and again, on purpose; those of the checks say what they need.
os.environ.setdefault("BERTH_CHECK_DUPLICATE_WINDOW", "0")

# An example that falls into a moment in which the machine stands still is no slow one: 200 ms by
# default, and 1 s for all draws of the first ten. The time limit of the test holds.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


# Where no log is configured, structlog prints the locals of each frame of an error: 7 s for one of
# the API.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)


def cancel_all_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """What asyncio does before it closes a loop, until it has come true: under Python 3.11 redis-py
    may drop a cancellation, and asyncio, which cancels once, would wait for ever."""
    while unfinished := asyncio.all_tasks(loop):
        for task in unfinished:
            task.cancel()
        loop.run_until_complete(asyncio.wait(unfinished, timeout=1.0))
        for task in unfinished:
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None:
                loop.call_exception_handler(
                    {"message": "a task failed", "exception": error, "task": task}
                )


@pytest.fixture(scope="session", autouse=True)
def loops_that_close() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.runners, "_cancel_all_tasks", cancel_all_tasks)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_new_day() -> Iterator[None]:
    """At no time of day do lists of orders begin anew, or does a morning come, while the tests run.

    Else an order of a minute before midnight in Taipei is on no list any more, and a person has to
    decide.
    """
    begins = time_half_a_day_away(time.time_ns() // 1_000_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BERTH_EXCHANGE_DAY_BEGINS", begins.isoformat("minutes"))
        patch.setenv("BERTH_MORNING_AT", "")
        patch.setenv("BERTH_EVENING_AT", "")
        yield


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    """A folder that other users may pass through: PostgreSQL refuses to run as root."""
    path = Path(tempfile.mkdtemp(prefix="berth-tests-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A folder with a path short enough for a Unix socket (107 bytes)."""
    path = Path(tempfile.mkdtemp(prefix="berth-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def valkey_server(server_directory: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(server_directory / "valkey", durable=False) as server:
        yield server


@pytest.fixture
async def valkey_client(valkey_server: ValkeyServer) -> AsyncIterator[Redis]:
    """A client of an empty Valkey."""
    client = valkey.connect_valkey(valkey_server.url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def postgres_server(server_directory: Path) -> Iterator[PostgresServer]:
    with PostgresServer(server_directory / "postgres", durable=False) as server:
        yield server


@pytest.fixture
def empty_database(postgres_server: PostgresServer) -> Iterator[str]:
    """URL of a new, empty database, which is dropped: a thousand of them are 8 GB to delete at the
    end."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    yield postgres_server.create_database(name)
    drop_database(postgres_server, name)


@pytest.fixture(scope="session")
def migrated_databases(postgres_server: PostgresServer) -> Iterator[MigratedDatabases]:
    with MigratedDatabases(postgres_server) as databases:
        yield databases


@pytest.fixture
def migrated_database(
    postgres_server: PostgresServer, migrated_databases: MigratedDatabases
) -> Iterator[str]:
    """URL of a database with all tables and no rows."""
    name = migrated_databases.take()
    yield postgres_server.url(name)
    migrated_databases.give_back(name)


@pytest.fixture
def services_database(migrated_database: str) -> str:
    """The same, for the role of the services, which does not own the tables."""
    return migrated_database.replace("//berth@", f"//{SERVICES}@")


@pytest.fixture(scope="session")
def temporal_server(server_directory: Path) -> Iterator[TemporalServer]:
    with TemporalServer(
        server_directory / "temporal",
        durable=False,
        search_attributes=SEARCH_ATTRIBUTES,
        dynamic=(*TemporalServer.dynamic, "frontend.WorkflowPauseEnabled=true"),
    ) as server:
        yield server


@pytest.fixture(scope="session")
def commands() -> Iterator[CommandForker]:
    """Runs `berth …`."""
    with CommandForker() as commands:
        yield commands


def _install_distribution(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a distribution of this repository is installed, as other projects install
    it."""
    source, target = tmp_path_factory.mktemp(folder) / "source", tmp_path_factory.mktemp("packages")
    shutil.copytree(ROOT / "infra" / folder, source)  # a build leaves files beside its source
    words = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *words, "--target", target, source],
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    return target


@pytest.fixture(scope="session")
def client_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the Python client is installed."""
    return _install_distribution("client", tmp_path_factory)


@pytest.fixture(scope="session")
def jobs_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package for own jobs is installed."""
    return _install_distribution("berth_jobs", tmp_path_factory)


@pytest.fixture(scope="session")
def docker_environment() -> Iterator[DockerEnvironment]:
    """A Docker daemon with the worker's image; where there can be none, its tests are skipped and
    say why."""
    needs.require("containers")
    from tests.support.systems.docker import open_docker_environment

    with contextlib.ExitStack() as stack:
        try:
            environment = stack.enter_context(open_docker_environment())
        except (PackagesAbsent, ServerFailed) as error:
            needs.skip("containers", str(error))
        yield environment


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What each asyncio task waited for, when a test met its time limit: its traceback ends in the
    loop."""
    report = yield
    if call.excinfo is not None and "Timeout (>" in str(call.excinfo.value):
        report.sections.insert(0, ("asyncio tasks", all_stacks()))
    return report


@pytest.hookimpl(trylast=True)
def pytest_exception_interact() -> None:
    """A failed test has a limit for its clean-up, too: pytest takes its own away with the first
    error.

    The limit of the next test takes this one's place.
    """
    faulthandler.dump_traceback_later(CLEAN_UP, exit=True, file=sys.__stderr__ or sys.stderr)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds each failure to the file that BERTH_FAILED_TESTS names, a line each.

    `.ci/run` prints these lines last. They are written at once: a run whose processes die has no
    summary.
    """
    path = os.environ.get("BERTH_FAILED_TESTS")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash is not None else report.longreprtext
        with Path(path).open("a", encoding="utf-8") as failures:
            failures.write(f"{report.nodeid} ({report.when}): {' '.join(reason.split())[:300]}\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test whose needs are not met here, before any of its fixtures starts a server."""
    needs.require_marked(item)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what this machine could not run, a line for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_sep("=", "not run on this machine")
    for line in needs.lines_of(skipped):
        terminalreporter.write_line(line)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> UnitScheduling | None:
    """Units of our own in place of modules."""
    return UnitScheduling(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the units. A longer limit with containers: the first such test waits for daemon and
    image."""
    sort_units(items, config.rootpath)
    for item in items:
        if (
            "docker_environment" in getattr(item, "fixturenames", ())
            or "docker" in item.name.partition("[")[2]
        ):
            item.add_marker(pytest.mark.timeout(240))
