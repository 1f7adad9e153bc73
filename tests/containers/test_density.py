"""`berth bench density` with small numbers, on the system of these tests."""

from __future__ import annotations

import pytest

from infra.lab.bench import density
from infra.lab.target import Target
from tests.support.systems.docker import POOL, WORKER_IMAGE, DockerEnvironment
from tests.support.systems.local import RunningSystem


def test_density_is_measured_while_a_container_eats_memory(
    system: RunningSystem, docker_environment: DockerEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    result = density.measure(
        Target(system.stack),
        docker_environment.socket,
        WORKER_IMAGE,
        POOL,
        seconds=2.0,
        rate=4.0,
        settle=0.5,
    )
    assert (result["workers"], result["n"], result["workers_lost"]) == (POOL, 8, 0)
    assert result["pss_mib_each"] > 5
    assert 0 < result["quiet_p50_ms"] <= result["quiet_p99_ms"]
    assert 0 < result["order_p50_ms"] <= result["order_p99_ms"]
    assert result["eaters_killed"] >= 1
    density.table(result)
    assert "density: 2 active workers in containers" in capsys.readouterr().out
