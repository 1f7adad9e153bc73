"""The short form of `berth chaos jobs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.lab.chaos.jobs import experiment


@pytest.mark.drill
@pytest.mark.timeout(240)
def test_killed_and_frozen_runners_lose_no_job_and_run_none_twice(short_directory: Path) -> None:
    result = experiment.run(kills=200, seed=1, folder=short_directory)
    assert result["findings"] == []
    assert (result["lost"], result["doubled"], result["wrong"]) == (0, 0, 0)
    assert result["kills"] >= 200
    assert result["jobs"] > 200
    assert result["freezes"] > result["freezes_past_lease"] > 0
    assert result["late_ends"] > 0
    assert result["faults"] == {"flush": 1, "restart": 1}
    assert result["outcome_unknown"] > 0  # runners died with such jobs in hand
    assert result["rerun_p99_s"] > 0
