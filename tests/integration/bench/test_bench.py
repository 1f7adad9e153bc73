"""`berth bench …` with small numbers: it ends well, writes its figures and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.lab.bench.starvation.cpu_group import cpu_group
from infra.node.cgroup import LimitsUnavailable
from tests.integration.local.conftest import wait_nothing_left

BERTH = str(Path(sys.executable).with_name("berth"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def _bench(folder: Path, *words: str) -> dict[str, Any]:
    """Runs one benchmark whose folders lie in `folder`; its figures. Nothing of it may be left."""
    folder.chmod(0o755)  # PostgreSQL may run as another user
    figures = folder / "figures.json"
    own = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    done = subprocess.run(
        [BERTH, "bench", *words, "--json", str(figures)],
        # One process serves the API: each further one takes 2 s of CPU to start, and none is measured here.
        env=own | {"TMPDIR": str(folder), "BERTH_API_PROCESSES": "1", "NO_COLOR": "1", "COLUMNS": "200"},
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
    result: dict[str, Any] = json.loads(figures.read_text())
    assert result["machine"]["cores"] >= 1
    return result


def test_claims_are_measured_from_a_full_pool_and_with_refill_and_none_is_double(
    short_directory: Path,
) -> None:
    result = _bench(short_directory, "claim", "-n", "2", "--refill-n", "2")
    assert (result["rate"], result["n"]) == (5.0, 2)
    assert result["double_claims"] == 0
    assert result["warm_share"] == 1.0
    assert 0 < result["p50_ms"] <= result["p90_ms"] <= result["p99_ms"]
    refill = result["refill"]
    assert refill["rate"] == 2.0
    assert 0 < refill["p50_ms"] <= refill["p99_ms"]


def test_orders_are_measured_beside_the_floor(short_directory: Path) -> None:
    short = ["-n", "20", "--users", "1", "--seconds", "1", "--knee-users", "2", "--knee-first", "150"]
    result = _bench(short_directory, "order", *short)
    assert result["n"] == 20
    assert 0 < result["p50_ms"] <= result["p99_ms"]
    assert 0 < result["floor_p50_ms"] <= result["floor_p99_ms"]
    assert result["floor_p50_ms"] < result["p50_ms"]
    assert result["users"] == 1
    assert result["orders_per_s"] > 0
    first, *_, last = result["knee_steps"]
    assert first["rate_per_s"] == 150.0
    assert last["p99_ms"] > 50.0 or last["done_per_s"] < last["rate_per_s"]
    assert 0 <= result["knee_per_s"] < last["rate_per_s"]
    assert result["knee_users"] == 2


def test_memory_is_measured_of_idle_workers_and_of_an_active_one(short_directory: Path) -> None:
    result = _bench(short_directory, "memory", "--workers", "2")
    assert result["workers"] == 2
    # Two workers share little more than one: both figures came out as 23.4 MiB in a run of the suite, so
    # only a clearly larger share per worker (1 MiB) would be wrong.
    assert 0 < result["idle_pss_mib"] <= result["idle_alone_pss_mib"] + 1.0
    assert result["active_pss_mib"] > 0


def test_recovery_is_measured_from_the_kill_to_active_on_a_higher_epoch(short_directory: Path) -> None:
    result = _bench(short_directory, "recovery", "-n", "4", "--replaced", "1", "--frozen", "1")
    assert result["n"] == 4
    assert 0 < result["p50_s"] <= result["p99_s"] <= result["max_s"]
    assert {kill: part["n"] for kill, part in result["by_kill"].items()} == {"tree": 3, "zygote": 1}
    assert result["orders_filled"] + result["orders_unknown"] + result["orders_refused"] == 4
    assert 0 < result["order_p50_s"] <= result["order_p99_s"]
    assert {kind: part["n"] for kind, part in result["in_place"].items()} == {"session": 1, "frozen": 1}
    # A stopped session is only missed after the pulse timeout.
    assert result["in_place"]["frozen"]["p50_s"] > result["pulse_timeout_s"] / 2


def test_users_at_rest_are_measured_beside_a_workflow_that_polls(short_directory: Path) -> None:
    # So many that a naive workflow is due every 2 s: one is in the six seconds wherever these begin.
    result = _bench(short_directory, "idle", "--workers", "30", "--minutes", "0.1")
    assert result["workers"] == result["active_at_the_end"] == 30
    # Six seconds of rest: at the most the pool looked once, as it does every minute, shared by all users.
    assert "UserWorkerWorkflow" not in result["actions_by_workflow"], result["actions_by_workflow"]
    assert result["actions_per_hour"] <= 2 / 30 / (0.1 / 60), result["actions_by_workflow"]
    # A timer and an activity a minute; in six seconds one user in ten is due.
    assert 0 < result["naive_actions_per_hour"] <= 5 * 120
    assert result["used_actions_per_hour"] <= 6
    for name in ("server", "orchestrator", "naive_server", "naive_worker"):
        assert 0 <= result[f"{name}_cpu_pct"] < 100 * result["machine"]["cores"]
    assert list(result["sizes"]) == ["30"]


def test_killed_claimers_leave_no_double_claim_and_no_lost_worker(short_directory: Path) -> None:
    # So many that the race lasts for several kills, of which there is one a second, on a fast machine too.
    result = _bench(short_directory, "claim-race", "--claims", "15000")
    assert (result["claims"], result["double"], result["lost"]) == (15000, 0, 0)
    assert result["workers"] >= 15000
    assert result["kills"] > 0
    assert result["repeated"] > 0
    assert result["released"] > 0
    assert result["per_s"] > 0
    assert result["floor_per_s"] > 0
    # Of Valkey's own time: by the clock, the two were measured at different moments of this machine.
    assert 0 < result["per_core_s"] < result["floor_per_core_s"]


def test_a_pass_of_maintenance_cleans_up_what_was_planted(short_directory: Path) -> None:
    result = _bench(short_directory, "sweep", "--workers", "300")
    assert (result["workers"], result["anomalies"]) == (300, 30)
    assert 0 < result["scan_s"] < result["total_s"]
    assert set(result["found"].values()) == {6}


def test_jobs_are_measured_beside_the_peers_and_the_floors(short_directory: Path) -> None:
    words = ("--seconds", "0.2", "--rounds", "1", "--runners", "1", "--pickups", "5")
    result = _bench(short_directory, "jobs", *words, "--lease", "5", "--kills", "1")
    for name in ("fresh", "recycled", "rq", "rq_simple", "huey"):
        part = result[name]["1"]
        assert part["per_s"] > 0
        assert part["cpu_per_s"] > 0
        assert 0 < part["p50_ms"] <= part["p99_ms"]
    assert result["times_rq"]["fresh"]["1"] > 0
    assert result["floor_per_s"] > result["fork_floor_per_s"] > 0
    (rerun,) = result["rerun_s"]
    assert rerun > 0.5  # nobody is taken for dead before most of a lease has passed
    assert result["idle_pss_mib"] > 0


def _need_quotas() -> None:
    try:
        with cpu_group(f"berth-probe-{os.getpid()}", 100):
            pass
    except LimitsUnavailable as error:
        pytest.skip(f"no CPU quota can be set here: {error.detail}")


def test_leases_of_a_throttled_runner_are_counted_beside_the_naive_ones(short_directory: Path) -> None:
    _need_quotas()
    result = _bench(short_directory, "lease", "--seconds", "3", "--quota", "100")
    part = result["100"]
    assert {"lost", "late", "naive_lost", "naive_late", "nr_throttled"} <= part.keys()
    assert set(part["by_design"]) == {"ours", "thread", "asyncio"}
    for one in part["by_design"].values():
        assert one["nr_periods"] > 0  # the quota was in force
        assert one["max_gap_s"] > 0


def test_renewals_of_a_throttled_worker_are_counted_beside_the_naive_ones(short_directory: Path) -> None:
    _need_quotas()
    words = ("--seconds", "12", "--quota", "100", "--load", "processes")
    result = _bench(short_directory, "heartbeat", *words)
    part = result["by_quota"]["100"]["by_load"]["processes"]
    assert result["late_after_s"] == result["mark_period_s"] + 1
    assert result["renewals"] >= 1
    assert {"late", "naive_late", "nr_throttled"} <= part.keys()
    assert part["nr_periods"] > 0  # the quota was in force
    # A call that blocks for half of the time keeps the naive renewals from being made at all.
    assert result["naive_max_gap_s"] >= 6
