"""The benchmarks with small numbers: each ends well, gives its figures and leaves nothing behind.

Two of them run whole, as `berth bench …`: one on a stack, one on a bare server. The others are
called in this process, and those that need no stack of their own share one.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.cli.app import app
from infra.lab.bench import aims, beside, claim, flood, order, recovery, waits
from infra.lab.bench.claim_race import race
from infra.lab.bench.fleet import idle, maintenance
from infra.lab.bench.jobs import comparison, crashes, own_types, tiers
from infra.lab.bench.starvation import heartbeat
from infra.lab.target import Target, running
from infra.local.process import ServerFailed, free_ports
from tests.support.systems.processes import wait_nothing_left

BERTH = str(Path(sys.executable).with_name("berth"))
#: Of the stack that several benchmarks share. Seconds: a session that stands still is replaced
#: after it.
PULSE_TIMEOUT = 4.0
POOL = 3
#: What a minute costs all users together: the pool's check and a pass of maintenance that finds
#: nothing.
MINUTE = {
    "WorkerPoolWorkflow": Counter(timers=1, activities=1),
    "MaintenanceWorkflow": Counter(starts=1, activities=2),
}

pytestmark = [pytest.mark.drill, pytest.mark.timeout(240)]


def _bench(folder: Path, *words: str) -> dict[str, Any]:
    """Runs one benchmark as a command with its folders in `folder`; its figures. It must leave
    nothing."""
    folder.chmod(0o755)  # PostgreSQL may run as another user
    figures = folder / "figures.json"
    own = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    done = subprocess.run(
        [BERTH, "bench", *words, "--json", str(figures)],
        # One process serves the API: each further one takes 2 s of CPU to start, and none is
        # measured here.
        env=own
        | {"TMPDIR": str(folder), "BERTH_API_PROCESSES": "1", "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    wait_nothing_left(folder)
    assert [path.name for path in folder.iterdir()] == ["figures.json"]
    assert f"{words[0]}: " in done.stdout  # the table's title
    assert f"{words[0]}: aims" in done.stdout
    result: dict[str, Any] = json.loads(figures.read_text())
    assert {aim["met"] for aim in result["aims"]} <= {True, False}
    assert result["machine"]["cores"] >= 1
    return result


@pytest.fixture(scope="module")
def bench_folder() -> Iterator[Path]:
    """The folder in which benchmarks that run in this process make theirs. They must remove
    them."""
    folder = Path(tempfile.mkdtemp(prefix="berth-"))
    folder.chmod(0o755)  # PostgreSQL may run as another user
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("BERTH_API_PROCESSES", "1")
        yield folder
    wait_nothing_left(folder)
    folder.rmdir()  # fails if something is left


@pytest.fixture(scope="module")
def target(bench_folder: Path) -> Iterator[Target]:
    """One stack for the benchmarks that only need one that runs."""
    port, _ = free_ports(2)
    with running(
        pool_target=POOL,
        exchange_orders_per_10s=order.ORDERS_PER_10S,
        pulse_timeout=PULSE_TIMEOUT,
        metrics_address=f"127.0.0.1:{port}",
    ) as started:
        yield started


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[str], bool]:
    """Says whether a table with this title was printed."""
    return lambda name: f"{name}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "claim --rate 5 -n 2 --refill-rate 2 --refill-n 2",
        "order -n 20 --users 1 --seconds 1 --knee-users 2 --knee-first 400",
        "beside .. --work claim --blocks 2",
        "waits --users 1 --readers 2 --starts 1 --seconds 1",
        "flood --seconds 1 --orders 5 --requests 20 --connections 2",
        "memory --workers 2 --settle 1",
        "density --workers 2 --seconds 2 --rate 5",
        "recovery -n 4 --replaced 1 --frozen 1 --stalled 2",
        "idle --workers 30,40 --minutes 0.1",
        "heartbeat --seconds 5 --quota 100 --load processes",
        "claim-race --claims 1000",
        "maintenance --workers 300",
        "jobs --seconds 1 --rounds 1 --runners 1,2 --pickups 5 --lease 2 --kills 1",
        "job-crashes --jobs 5 --lease 2 --frozen 3 --patience 10",
        "own-jobs --seconds 1 --rounds 1 --enqueued 100 --few 200 --many 300 --claims 100",
        "tiers --seconds 2 --rate 5 --flood 500 --flood-rate 50",
        "lease --seconds 2 --quota 100 --load threads",
        "all",
    ],
)
def test_a_benchmark_that_cannot_write_its_figures_does_not_begin(
    words: str, tmp_path: Path
) -> None:
    """By then its options were read, and they are what it takes."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        figures = tmp_path / "missing" / "figures.json"
        done = CliRunner().invoke(app, ["bench", *words.split(), "--json", str(figures)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.exit_code == 1
    assert "No such file or directory" in done.output


def test_orders_are_measured_with_bad_keys_of_every_kind_and_no_bad_key_is_accepted(
    target: Target, printed: Callable[[str], bool]
) -> None:
    result = flood.measure(target, seconds=1.0, orders=20.0, requests=200.0, connections=4)
    flood.table(result)
    assert printed("flood")
    assert set(result["floods"]) == {"malformed", "made up", "of a later version"}
    for kind, measured in result["floods"].items():
        assert set(measured["statuses"]) <= {"401", "429"}, (kind, measured)
        assert measured["statuses"]["429"] > 0
        assert 0 < measured["p50_ms"] <= measured["p99_ms"]
    assert [aim["what"] for aim in aims.judge(aims.AIMS["flood"], result)] == [
        "worst p99 of orders, times the quiet one"
    ]


def test_claims_are_measured_from_a_full_pool_and_with_refill_and_none_is_double(
    target: Target, printed: Callable[[str], bool]
) -> None:
    result = claim.measure(target, rate=5.0, n=2, refill_rate=2.0, refill_n=2, pool=POOL)
    claim.table(result)
    assert printed("claim")
    assert (result["rate"], result["n"]) == (5.0, 2)
    assert result["double_claims"] == 0
    assert result["warm_share"] == 1.0
    assert 0 < result["p50_ms"] <= result["p90_ms"] <= result["p99_ms"]
    refill = result["refill"]
    assert refill["rate"] == 2.0
    assert 0 < refill["p50_ms"] <= refill["p99_ms"]


def test_orders_are_measured_beside_the_floor(
    target: Target, printed: Callable[[str], bool]
) -> None:
    result = order.measure(target, n=20, users=1, seconds=1.0, knee_users=2, knee_first=400.0)
    order.table(result)
    assert printed("order")
    assert result["n"] == 20
    assert 0 < result["p50_ms"] <= result["p99_ms"]
    assert 0 < result["floor_p50_ms"] <= result["floor_p99_ms"]
    assert result["floor_p50_ms"] < result["p50_ms"]
    assert 0 < result["login_rejected"]["p50_ms"] <= result["login_rejected"]["p99_ms"]
    assert result["users"] == 1
    assert result["orders_per_s"] > 0
    first, *_, last = result["knee_steps"]
    assert first["rate_per_s"] == 400.0
    assert last["p99_ms"] > 50.0 or last["done_per_s"] < last["rate_per_s"]
    assert 0 <= result["knee_per_s"] < last["rate_per_s"]
    assert result["knee_users"] == 2


@pytest.mark.parametrize("work", ["order", "claim"])
def test_two_checkouts_take_turns(
    bench_folder: Path, printed: Callable[[str], bool], work: str
) -> None:
    result = beside.run(str(Path(beside.__file__).parents[3]), work, blocks=3)
    beside.table(result)
    assert printed("beside")
    for side in ("there", "here"):
        assert 0 < result[side]["p50_ms"] <= result[side]["p99_ms"]
        assert {"api", "workers", "postgres"} <= result[side]["cpu_ms"].keys()
    low, high = result["ratio_quartiles"]
    assert 0.2 < low <= result["ratio"] <= high < 5  # the same code, on a machine that may stumble


def test_all_processes_of_a_side_run_the_code_of_its_checkout(tmp_path: Path) -> None:
    here = Path(beside.__file__).parents[3]
    for package in ("api", "infra", "worker_runtime"):
        (tmp_path / package).symlink_to(here / package)
    child = [sys.executable, "-P", "-c", "import api; print(api.__file__)"]
    # What a process of the local system gives to those that it starts.
    starts = (
        "import subprocess; from infra.local.process import inherited_environment; "
        f"subprocess.run({child!r}, env=inherited_environment(), check=True)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", starts],
        env=beside.environment_of(tmp_path),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(tmp_path / "api" / "__init__.py")


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="no checkout"):
        beside.run(str(tmp_path))


@pytest.mark.parametrize("code", ["oops", "import time; time.sleep(60)"], ids=["ends", "hangs"])
def test_a_checkout_that_does_not_start_ends_the_bench(
    code: str, bench_folder: Path, tmp_path: Path
) -> None:
    (broken := tmp_path / "infra" / "lab").mkdir(parents=True)
    for module in (broken.parent / "__init__.py", broken / "__init__.py", broken / "target.py"):
        module.touch()
    (broken / "figures.py").write_text(code)
    with pytest.raises(ServerFailed, match="has ended"):
        beside.run(str(tmp_path), timeout_s=3.0)


def test_waits_for_connections_are_measured_under_load(
    target: Target, printed: Callable[[str], bool]
) -> None:
    target.fill_pool(POOL)
    result = waits.measure(target, users=2, readers=12, starts=1, seconds=1.0)
    waits.table(result)
    assert printed("waits")
    for process in ("api", "orchestrator"):
        for kind in ("database", "valkey"):
            part = result[process]
            assert part[f"{kind}_waits"] > 0, (process, kind)
            assert 0 < part[f"{kind}_p50_ms"] <= part[f"{kind}_p99_ms"]
    assert result["orders_per_s"] > 0
    assert result["reads_per_s"] > 0
    assert len(aims.judge(aims.AIMS["waits"], result)) == 4


def test_memory_is_measured_of_idle_workers_and_of_an_active_one(short_directory: Path) -> None:
    result = _bench(short_directory, "memory", "--workers", "2", "--settle", "0.5")
    assert result["workers"] == 2
    # Two workers share little more than one: both figures came out as 23.4 MiB in a run of the
    # suite, so only a clearly larger share per worker (1 MiB) would be wrong.
    assert 0 < result["idle_pss_mib"] <= result["idle_alone_pss_mib"] + 1.0
    assert result["active_pss_mib"] > 0


def test_recovery_is_measured_from_the_kill_to_active_on_a_higher_epoch(
    target: Target, printed: Callable[[str], bool]
) -> None:
    result = recovery.measure(target, n=4, replaced=1, frozen=1, stalled=2)
    recovery.table(result)
    assert printed("recovery")
    assert result["n"] == 4
    assert 0 < result["p50_s"] <= result["p99_s"] <= result["max_s"]
    assert {kill: part["n"] for kill, part in result["by_kill"].items()} == {"tree": 3, "zygote": 1}
    assert result["orders_filled"] + result["orders_unknown"] + result["orders_refused"] == 4
    assert 0 < result["order_p50_s"] <= result["order_p99_s"]
    assert {kind: part["n"] for kind, part in result["in_place"].items()} == {
        "session": 1,
        "frozen": 1,
    }
    # A stopped session is only missed after the pulse timeout.
    assert result["pulse_timeout_s"] == PULSE_TIMEOUT
    assert result["in_place"]["frozen"]["p50_s"] > PULSE_TIMEOUT / 2
    assert result["stall"] == {"s": 6.0, "users": 2, "replaced": 0}


def test_users_at_rest_are_compared_with_a_workflow_that_polls(
    bench_folder: Path, printed: Callable[[str], bool]
) -> None:
    # With 30 of them a naive workflow is due every 2 s: one is in the six seconds wherever these
    # begin.
    result = idle.run(workers=[30], minutes=0.1, settle=3.0, base=1.0)
    idle.table(result)
    assert printed("idle")
    assert result["workers"] == result["active_at_the_end"] == 30
    # Six seconds of rest: the users cost nothing, and what comes once a minute came once at the
    # most.
    by_workflow = result["actions_by_workflow"]
    minutes = math.ceil(result["minutes"])
    assert by_workflow.keys() <= MINUTE.keys(), by_workflow
    for name, kinds in by_workflow.items():
        assert Counter(kinds) <= Counter({kind: n * minutes for kind, n in MINUTE[name].items()}), (
            by_workflow
        )
    total = sum(sum(kinds.values()) for kinds in by_workflow.values())
    assert result["actions_per_hour"] <= total / 30 / (0.1 / 60), by_workflow
    # A timer and an activity a minute; in six seconds one user in ten is due.
    assert 0 < result["naive_actions_per_hour"] <= 5 * 120
    assert result["used_actions_per_hour"] <= 6
    for name in ("server", "orchestrator", "naive_server", "naive_worker"):
        assert 0 <= result[f"{name}_cpu_pct"] < 100 * (os.cpu_count() or 1)
    assert list(result["sizes"]) == ["30"]


def test_killed_claimers_leave_no_double_claim_and_no_lost_worker(
    bench_folder: Path, printed: Callable[[str], bool]
) -> None:
    # The race lasts for several kills, on a fast machine too.
    result = race.run(claims=5000, kill_period=0.5)
    race.table(result)
    assert printed("claim-race")
    assert (result["claims"], result["double"], result["lost"]) == (5000, 0, 0)
    assert result["workers"] >= 5000
    assert result["kills"] > 0
    assert result["repeated"] > 0
    assert result["released"] > 0
    assert result["per_s"] > 0
    assert result["floor_per_s"] > 0
    # Of Valkey's own time: by the clock, the two were measured at different moments of this
    # machine.
    assert 0 < result["per_core_s"] < result["floor_per_core_s"]


def test_a_pass_of_maintenance_cleans_up_what_was_planted(
    bench_folder: Path, printed: Callable[[str], bool]
) -> None:
    result = maintenance.run(workers=[300])
    maintenance.table(result)
    assert printed("maintenance")
    assert (result["workers"], result["anomalies"]) == (300, 30)
    assert 0 < result["scan_s"] < result["total_s"]
    assert set(result["found"].values()) == {6}


def test_jobs_are_compared_with_the_peers_and_the_floors(
    bench_folder: Path, printed: Callable[[str], bool]
) -> None:
    result = comparison.run(
        seconds=0.2, rounds=1, runners=[1], pickups=5, lease=2.0, kills=1, pops=2000, forks=50
    )
    comparison.table(result)
    assert printed("jobs")
    for name in ("fresh", "recycled", "rq", "rq_simple", "huey"):
        part = result[name]["1"]
        assert part["per_s"] > 0
        assert part["cpu_per_s"] > 0
        assert 0 < part["p50_ms"] <= part["p99_ms"]
    assert result["times_rq"]["fresh"]["1"] > 0
    assert result["floor_per_s"] > result["fork_floor_per_s"] > 0
    (rerun,) = result["rerun_s"]
    assert rerun > 0.5  # no runner is taken for dead before most of a lease has passed
    assert result["idle_pss_mib"] > 0
    assert {name: peer["keeps_jobs"] for name, peer in result["peers"].items()} == {
        "rq": True,
        "rq_simple": True,
        "huey": False,
    }
    assert all(peer["version"] for peer in result["peers"].values())
    judged = {aim["what"] for aim in aims.judge(aims.AIMS["jobs"], result)}
    # Only a run with all peers can say which of them is the fastest.
    assert not any("fastest peer" in name for name in judged)


def test_crashes_lose_jobs_of_a_peer_and_no_job_of_ours(
    printed: Callable[[str], bool],
) -> None:
    result = crashes.run(
        peers=sys.executable,
        names=["huey"],
        jobs=6,
        seconds=1.5,  # a busy machine takes half a second to kill
        lease=2.0,
        frozen=3.0,
        patience=8.0,
    )
    crashes.table(result)
    assert printed("job crashes")
    ours, huey = result["matrix"][crashes.OURS], result["matrix"]["huey"]
    assert {fault: counts["lost"] for fault, counts in ours.items()} == dict.fromkeys(
        crashes.FAULTS, 0
    )
    assert ours["runner"]["doubled"] == ours["server"]["doubled"] == 0
    assert 0 < ours["child"]["late_s"] < ours["runner"]["late_s"] + 2.0
    assert huey["runner"]["lost"] == 2  # those that its worker had taken
    judged = aims.judge(aims.AIMS["job-crashes"], result)
    assert [aim["met"] for aim in judged] == [True] * 5


def test_own_types_are_compared_with_built_in_ones(
    printed: Callable[[str], bool],
) -> None:
    result = own_types.run(seconds=0.2, rounds=1, enqueued=500, few=200, many=1000, claims=40)
    own_types.table(result)
    assert printed("own jobs")
    assert result["direct_per_s"] > 0
    for way in ("fresh", "recycled"):
        figure = result[way]
        assert figure["ratio"] == pytest.approx(
            figure["built_in_per_s"] / figure["own_per_s"], rel=0.1
        )
    assert result["claim_us"].keys() == {"200", "1000"}
    assert len(aims.judge(aims.AIMS["own-jobs"], result)) == 4


def test_tiers_are_measured_during_a_flood(printed: Callable[[str], bool]) -> None:
    result = tiers.run(seconds=1.0, rate=10.0, flood=500, flood_rate=100.0)
    tiers.table(result)
    assert printed("tiers")
    for part in ("flooded", "shared"):
        assert result[part]["flood_waiting"] > 300
        assert set(result[part]["tiers"]) == set(tiers.TIERS) - {tiers.FLOODED_TIER}
        assert all(tier["p99_ms"] > 0 for tier in result[part]["tiers"].values())
    # With a runner of its own no tier waits for the flood.
    assert result["shared"]["all"]["p50_ms"] > result["flooded"]["all"]["p50_ms"]


@pytest.mark.needs("cpu quotas")
def test_a_throttled_runner_loses_no_lease_and_its_late_renewals_are_reported(
    short_directory: Path,
) -> None:
    result = _bench(short_directory, "lease", "--seconds", "2", "--quota", "100")
    part = result["100"]
    assert part["lost"] == 0
    ours = part["by_design"]["ours"]
    assert part["late"] == ours["late"]
    # A renewal is late after its period, a third of the lease, and the tolerance.
    assert (ours["late"] > 0) == (
        ours["max_gap_s"] >= part["lease_s"] / 3 + result["late_after_s"]
    ), ours
    naive = [part["by_design"][design] for design in ("thread", "asyncio")]
    assert part["naive_lost"] == sum(design["lost"] for design in naive)
    assert part["naive_late"] == sum(design["late"] for design in naive)
    assert set(part["by_design"]) == {"ours", "thread", "asyncio"}
    for design in part["by_design"].values():
        # The quota was in force, though a busy host may give less than it.
        assert design["nr_periods"] > 0
        assert design["max_gap_s"] > 0


@pytest.mark.needs("cpu quotas")
def test_a_throttled_worker_renews_in_time_and_a_naive_one_does_not(
    bench_folder: Path, printed: Callable[[str], bool]
) -> None:
    # Marks are due each 2 s: next to other tests a process waits for a second now and then.
    result = heartbeat.run(seconds=8.0, quotas=[100], loads=["processes"], mark_period=2.0)
    heartbeat.table(result)
    assert printed("heartbeat")
    part = result["by_quota"]["100"]["by_load"]["processes"]
    assert result["late_after_s"] == result["mark_period_s"] + 1 == 3.0
    assert result["renewals"] >= 1
    assert part["late"] == result["late"] == 0
    assert part["max_gap_s"] <= result["late_after_s"]
    assert part["naive_max_gap_s"] > part["max_gap_s"]
    # The quota was in force. On a host that is busy with other things it may never be used up.
    assert part["nr_periods"] > 0
    # A call that blocks for half of the time keeps the naive renewals from being made at all.
    assert result["naive_max_gap_s"] >= 4.0
