"""Chooses which drills a run takes: those of what changed lately, and a quarter of the rest.

A drill is a test that takes minutes, mostly with a whole system of its own, and is marked `drill`.
`--drills=rotate`, which `.ci/run` passes, leaves out those that are not due:

- A drill runs if one of its paths changed in the last `RECENT_COMMITS` commits, or has changes that
  are not committed. A Python file whose comments and docstrings alone changed does not count.
- Of the rest, one quarter runs: the number of commits, modulo 4, chooses it. Each drill keeps its
  quarter until `DRILLS` changes, and the quarters take about equally long.
- Without a full history (no git, a shallow clone) all drills run. A drill without an entry in
  `DRILLS` always runs.

The head of pytest's output names each drill that runs and each that is left out, with the reason.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from xdist.workermanage import WorkerController

#: Commits, without merges, in which a change of a drill's paths makes it run.
RECENT_COMMITS = 20
#: Parts into which the drills are divided; a run takes one of them.
ROTATION_PARTS = 4


@dataclass(frozen=True)
class DrillGroup:
    """Drills that share a system, and the paths that they are about."""

    name: str
    #: Tests, modules, or folders with a slash at their end. Drills below them belong to this entry.
    tests: tuple[str, ...]
    #: Files, or folders with a slash at their end. A change of the drills' own module counts, too.
    about: tuple[str, ...]
    #: Process-seconds on 2 cores, rounded; they balance the quarters.
    duration_s: int

    def is_about(self, path: str) -> bool:
        """Returns True if a change of the file at `path` makes this drill run."""
        modules = [entry.partition("::")[0] for entry in self.tests]
        return any(
            path == entry or (entry.endswith("/") and path.startswith(entry))
            for entry in (*modules, *self.about)
        )

    def includes(self, node_id: str) -> bool:
        """Returns True if the test belongs to this entry."""
        return any(
            node_id.startswith(entry if entry.endswith("/") else (f"{entry}::", f"{entry}["))
            or node_id == entry
            for entry in self.tests
        )


BENCHES = "tests/integration/bench/test_bench.py"
UP = "tests/integration/local/test_up.py"

#: The first entry that includes a drill counts.
DRILLS = (
    DrillGroup(
        name="a second market",
        tests=("tests/e2e/test_second_market.py",),
        about=(
            "docs/how-to/add-a-broker.md",
            "worker_runtime/brokers/registry.py",
            "worker_runtime/protocol/broker_record.py",
            "worker_runtime/protocol/installed_brokers.py",
        ),
        duration_s=60,
    ),
    DrillGroup(
        name="sessions whose life is limited",
        tests=("tests/e2e/test_session_life.py",),
        about=(
            "worker_runtime/protocol/broker_record.py",
            "worker_runtime/trading/broker_sessions.py",
            "worker_runtime/trading/session_recovery.py",
        ),
        duration_s=90,
    ),
    DrillGroup(
        "compose",
        ("tests/compose/",),
        (
            ".dockerignore",
            "compose.yaml",
            "docs/how-to/build-a-job-image.md",
            "infra/compose/",
            "infra/images/",
            "infra/launchers/docker/",
            "infra/node/",
            "tests/support/systems/compose.py",
        ),
        400,
    ),
    DrillGroup(
        "benches of jobs",
        (
            f"{BENCHES}::test_jobs_are_compared_with_the_peers_and_the_floors",
            f"{BENCHES}::test_crashes_lose_jobs_of_a_peer_and_no_job_of_ours",
            f"{BENCHES}::test_own_types_are_compared_with_built_in_ones",
            f"{BENCHES}::test_tiers_are_measured_during_a_flood",
        ),
        ("infra/lab/bench/jobs/",),
        120,
    ),
    DrillGroup(
        "benches of fleets",
        (
            f"{BENCHES}::test_memory_is_measured_of_idle_workers_and_of_an_active_one",
            f"{BENCHES}::test_users_at_rest_are_compared_with_a_workflow_that_polls",
            f"{BENCHES}::test_a_pass_of_maintenance_cleans_up_what_was_planted",
        ),
        ("infra/lab/bench/fleet/", "infra/lab/bench/memory.py"),
        80,
    ),
    DrillGroup(
        "benches under a quota",
        (
            f"{BENCHES}::test_a_throttled_runner_loses_no_lease_and_its_late_renewals_are_reported",
            f"{BENCHES}::test_a_throttled_worker_renews_in_time_and_a_naive_one_does_not",
        ),
        ("infra/lab/bench/starvation/",),
        50,
    ),
    DrillGroup(
        "benches of checkouts",
        (
            f"{BENCHES}::test_two_checkouts_take_turns",
            f"{BENCHES}::test_a_folder_that_is_no_checkout_is_refused",
            f"{BENCHES}::test_a_checkout_that_does_not_start_ends_the_bench",
        ),
        ("infra/lab/bench/beside.py",),
        50,
    ),
    DrillGroup(
        "benches of orders and claims",
        (BENCHES,),
        (
            "infra/lab/bench/aims.py",
            "infra/lab/bench/claim.py",
            "infra/lab/bench/claim_race/",
            "infra/lab/bench/flood.py",
            "infra/lab/bench/order.py",
            "infra/lab/bench/recovery.py",
            "infra/lab/bench/waits.py",
            "infra/lab/target.py",
        ),
        120,
    ),
    DrillGroup(
        "kill steps beside an order's way",
        ("tests/chaos/test_steps.py",),
        (
            "activities/events/recorder.py",
            "activities/orders/",
            "infra/database/orders/",
            "tests/support/chaos/kill_steps.py",
            "tests/support/proxies/kill_points.py",
            "workflows/order/",
            "worker_runtime/trading/",
        ),
        300,
    ),
    DrillGroup(
        "rolling hosts",
        ("tests/chaos/test_drill.py",),
        ("activities/rollout/", "infra/launchers/process.py", "infra/node/", "workflows/rollout/"),
        120,
    ),
    DrillGroup(
        "lost host",
        ("tests/chaos/test_host_lost.py",),
        (
            "activities/claims/stop.py",
            "activities/events/mark_watcher.py",
            "activities/events/missing_marks.py",
            "activities/events/valkey_restorer.py",
            "workflows/user_worker/supervision.py",
        ),
        120,
    ),
    DrillGroup(
        "fencing, a flush and a lost mark under load",
        (
            "tests/chaos/test_fencing.py",
            "tests/chaos/test_flush.py",
            "tests/chaos/test_unmarked.py",
        ),
        (
            "activities/claims/",
            "activities/events/mark_watcher.py",
            "activities/events/missing_marks.py",
            "activities/events/valkey_restorer.py",
            "tests/chaos/conftest.py",
            "tests/support/chaos/system.py",
            "worker_runtime/protocol/lua/",
            "worker_runtime/session/",
        ),
        130,
    ),
    DrillGroup(
        "killed and frozen runners",
        ("tests/integration/jobs/runner/test_chaos.py",),
        ("infra/lab/chaos/jobs/", "worker_runtime/jobs/"),
        40,
    ),
    DrillGroup(
        "orders around the idle timeout",
        ("tests/e2e/test_idle_race.py",),
        ("activities/claims/", "workflows/user_worker/"),
        40,
    ),
    DrillGroup(
        "connections that die silently",
        ("tests/e2e/test_silent_connections.py",),
        (
            "infra/database/liveness.py",
            "infra/temporal/checked_service.py",
            "infra/valkey/client.py",
            "tests/support/proxies/silent.py",
            "worker_runtime/protocol/sockets.py",
        ),
        60,
    ),
    DrillGroup(
        "orchestrators restarted under load",
        ("tests/e2e/test_outages.py",),
        ("activities/orchestrator/", "infra/temporal/starter.py"),
        40,
    ),
    DrillGroup(
        "late lists",
        ("tests/chaos/test_late_lists.py",),
        ("activities/claims/", "activities/maintenance/", "infra/launchers/process.py"),
        60,
    ),
    DrillGroup(
        "chaos at the stand-in for Shioaji",
        (
            "tests/chaos/test_orders.py::test_no_order_is_lost_or_doubled_at_the_stand_in_for_shioaji",
        ),
        ("infra/lab/shioaji/", "infra/lab/chaos/orders/", "worker_runtime/brokers/shioaji/"),
        90,
    ),
    DrillGroup(
        "a flood in Valkey",
        ("tests/redteam/test_fleet_flood.py", "tests/redteam/test_memory_flood.py"),
        (
            "activities/events/cut_off.py",
            "activities/events/pump.py",
            "activities/events/quota_watcher.py",
            "infra/valkey/job_users.py",
            "infra/valkey/worker_users.py",
            "worker_runtime/protocol/lua/workers/",
        ),
        200,
    ),
    DrillGroup(
        "restore",
        ("tests/integration/local/test_restore.py",),
        ("infra/recovery/", "infra/database/migrations/"),
        150,
    ),
    DrillGroup(
        "two releases",
        ("tests/integration/local/test_two_releases.py",),
        (
            "activities/orchestrator/",
            "infra/database/migrations/",
            "tests/contract/protocol/",
            "tests/support/message_shapes.py",
            "worker_runtime/protocol/messages.py",
        ),
        120,
    ),
    DrillGroup(
        "versions of the orchestrator",
        ("tests/e2e/test_versions.py",),
        ("activities/orchestrator/", "workflows/entity.py", "workflows/sandbox.py"),
        150,
    ),
    DrillGroup(
        "key rotation",
        ("tests/e2e/test_key_rotation.py",),
        ("infra/cli/keys.py", "infra/vault/"),
        60,
    ),
    DrillGroup(
        "histories",
        ("tests/e2e/test_histories.py",),
        ("infra/temporal/codec.py", "infra/temporal/codec_server.py", "workflows/rollout/"),
        60,
    ),
    DrillGroup(
        "traces",
        ("tests/e2e/test_traces.py",),
        ("infra/tracing.py",),
        50,
    ),
    DrillGroup(
        "pages in a browser",
        ("tests/e2e/test_page.py",),
        ("api/page/",),
        200,
    ),
    DrillGroup(
        "damaged files",
        ("tests/integration/local/test_damage.py",),
        ("infra/local/",),
        60,
    ),
    DrillGroup(
        "down, and a start that is interrupted",
        (
            f"{UP}::test_down_stops_a_running_up_and_ends_what_a_killed_one_left",
            f"{UP}::test_a_start_that_is_interrupted_leaves_nothing_behind",
        ),
        ("infra/cli/stack.py", "infra/local/steps.py", "infra/local/process.py"),
        60,
    ),
    DrillGroup(
        "ways of the documents",
        ("tests/ways/",),
        ("docs/how-it-works/", "tests/support/call_tracing.py"),
        60,
    ),
    DrillGroup(
        "fleet of Valkey users",
        ("tests/e2e/test_worker_users.py",),
        ("infra/valkey/", "activities/events/pump.py", "infra/lab/bench/fleet/simulated/"),
        60,
    ),
    DrillGroup(
        "trading day",
        ("tests/workflow/days/test_trading_day.py",),
        ("workflows/morning/", "infra/market/", "tests/support/systems/moved_clock.py"),
        60,
    ),
    DrillGroup(
        "year",
        ("tests/workflow/days/test_year.py",),
        (
            "workflows/reports/",
            "infra/market/",
            "infra/temporal/schedules.py",
            "tests/support/systems/moved_clock.py",
        ),
        100,
    ),
)


@dataclass(frozen=True)
class History:
    """What git knows of a checkout."""

    commit_count: int
    changed: frozenset[str]


@dataclass(frozen=True)
class Choice:
    """Which drills a run takes; each has the reason."""

    summary: str
    taken: Mapping[str, str]
    left_out: Mapping[str, str]

    def lines(self) -> Iterator[str]:
        """Yields the lines of the head of pytest's output."""
        yield f"drills: {self.summary}"
        for name, reason in self.taken.items():
            yield f"  runs      {name}: {reason}"
        for name, reason in self.left_out.items():
            yield f"  left out  {name}: {reason}"


def read_history(root: Path) -> History | None:
    """Reads the number of commits and the paths of the last ones; None without git or a full
    history."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words],  # noqa: S607 - whichever git the machine has
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    try:
        if git("rev-parse", "--is-shallow-repository").strip() != "false":
            return None
        recent = git("log", f"--max-count={RECENT_COMMITS}", "--no-merges", "--format=%H").split()
        committed: dict[str, str] = {}  # path -> the first of these commits that changed it
        for commit in reversed(recent):
            options = ("--root", "--no-commit-id", "--name-only", "--no-renames", "-r", "-z")
            listing = git("diff-tree", *options, commit)
            for path in filter(None, listing.split("\0")):
                committed.setdefault(path, commit)
        listings = (
            git("diff", "HEAD", "--name-only", "--no-renames", "-z"),
            git("ls-files", "--others", "--exclude-standard", "-z"),
        )
        uncommitted = {path for listing in listings for path in listing.split("\0") if path}
        texts_only = _find_texts_only(root, committed)
        changed = frozenset(committed.keys() - texts_only | uncommitted)
        return History(int(git("rev-list", "--count", "HEAD")), changed)
    except (OSError, subprocess.CalledProcessError):
        return None


def _find_texts_only(root: Path, first_changes: Mapping[str, str]) -> set[str]:
    """Returns the Python files whose code is the one from before their first change: comments,
    docstrings and layout alone differ."""
    paths = [path for path in first_changes if path.endswith(".py")]
    before = _read_blobs(root, [f"{first_changes[path]}^:{path}" for path in paths])
    now = _read_blobs(root, [f"HEAD:{path}" for path in paths])
    return {
        path
        for path, *sources in zip(paths, before, now, strict=True)
        if None not in sources and code_of(sources[0]) == code_of(sources[1]) is not None
    }


def _read_blobs(root: Path, names: Sequence[str]) -> list[bytes | None]:
    """Reads files of commits, by names such as `HEAD:path`; None for one that is not there."""
    answer = subprocess.run(
        ["git", "-C", str(root), "cat-file", "--batch"],  # noqa: S607
        check=True,
        capture_output=True,
        input="".join(f"{name}\n" for name in names).encode(),
    ).stdout
    blobs: list[bytes | None] = []
    at = 0
    for _ in names:
        end_of_line = answer.index(b"\n", at)
        words = answer[at:end_of_line].split(b" ")
        at = end_of_line + 1
        if words[-1] == b"missing":
            blobs.append(None)
        else:
            size = int(words[-1])
            blobs.append(answer[at : at + size])
            at += size + 1
    return blobs


def code_of(source: bytes | None) -> str | None:
    """Returns what Python executes of a module, without docstrings; None if it is no Python."""
    try:
        tree = ast.parse(source or b"")
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_text(part)]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def divide(drills: Sequence[DrillGroup]) -> dict[str, int]:
    """Returns the part of the rotation, from 0, of each drill. The longest go first, to the
    emptiest part."""
    totals = [0] * ROTATION_PARTS
    parts = {}
    for drill in sorted(drills, key=lambda drill: (-drill.duration_s, drill.name)):
        part = totals.index(min(totals))
        parts[drill.name] = part
        totals[part] += drill.duration_s
    return parts


def choose_drills(history: History | None, drills: Sequence[DrillGroup] = DRILLS) -> Choice:
    """Chooses the drills of a run of this checkout."""
    if history is None:
        reason = "git has no full history here"
        return Choice(f"all, since {reason}", {drill.name: reason for drill in drills}, {})
    turn = history.commit_count % ROTATION_PARTS
    parts = divide(drills)
    taken, left_out = {}, {}
    for drill in drills:
        changed = sorted(filter(drill.is_about, history.changed))
        part = parts[drill.name]
        if changed:
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            taken[drill.name] = f"{changed[0]}{others} changed in the last {RECENT_COMMITS} commits"
        elif part == turn:
            taken[drill.name] = f"its part, {part + 1}, is due"
        else:
            left_out[drill.name] = f"its part is {part + 1}, and nothing that it is about changed"
    seconds = sum(drill.duration_s for drill in drills if drill.name in taken)
    return Choice(
        f"part {turn + 1} of {ROTATION_PARTS} is due at {history.commit_count} commits; about "
        f"{seconds} s "
        f"of {sum(drill.duration_s for drill in drills)} s run",
        taken,
        left_out,
    )


def drill_of(node_id: str, drills: Iterable[DrillGroup] = DRILLS) -> DrillGroup | None:
    """Returns the entry that a test marked `drill` belongs to."""
    return next((drill for drill in drills if drill.includes(node_id)), None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--drills",
        choices=("all", "rotate"),
        default="all",
        help="all: every drill. rotate: those whose paths changed lately, and a quarter of the "
        "rest",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the rotation if the run asks for it. The first process chooses, and tells the
    others."""
    if config.getoption("drills") != "rotate":
        return
    told = getattr(config, "workerinput", {}).get("left_out_drills")
    choice = choose_drills(read_history(config.rootpath)) if told is None else Choice("", {}, told)
    config.pluginmanager.register(DrillRotation(choice), "berth-drill-rotation")


class DrillRotation:
    """The plugin that reports the choice and leaves out the other drills."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def pytest_report_header(self) -> list[str]:
        return list(self._choice.lines())

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        node.workerinput["left_out_drills"] = dict(self._choice.left_out)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left_out = []
        for item in items:
            if item.get_closest_marker("drill") is not None:
                drill = drill_of(item.nodeid)
                if drill is not None and drill.name in self._choice.left_out:
                    left_out.append(item)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            gone = set(left_out)
            items[:] = [item for item in items if item not in gone]
