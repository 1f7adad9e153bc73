"""`berth bench …` with small numbers: it ends well, writes its figures and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
        env=own | {"TMPDIR": str(folder), "NO_COLOR": "1", "COLUMNS": "200"},
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
    result = _bench(short_directory, "order", "-n", "20", "--users", "1", "--seconds", "1")
    assert result["n"] == 20
    assert 0 < result["p50_ms"] <= result["p99_ms"]
    assert 0 < result["floor_p50_ms"] <= result["floor_p99_ms"]
    assert result["floor_p50_ms"] < result["p50_ms"]
    assert result["users"] == 1
    assert result["orders_per_s"] > 0


def test_memory_is_measured_of_idle_workers_and_of_an_active_one(short_directory: Path) -> None:
    result = _bench(short_directory, "memory", "--workers", "2")
    assert result["workers"] == 2
    # Two workers share little more than one: both figures came out as 23.4 MiB in a run of the suite, so
    # only a clearly larger share per worker (1 MiB) would be wrong.
    assert 0 < result["idle_pss_mib"] <= result["idle_alone_pss_mib"] + 1.0
    assert result["active_pss_mib"] > 0
