"""`berth bench density` with small numbers, on the daemon of the tests."""

from __future__ import annotations

import pytest

from infra.lab.bench import density
from tests.containers.docker_house import WORKER_IMAGE, DockerHouse


def test_density_is_measured_beside_a_container_that_eats_memory(
    docker_house: DockerHouse, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BERTH_DOCKER_SOCKET", str(docker_house.socket))
    monkeypatch.setenv("BERTH_DOCKER_IMAGE", WORKER_IMAGE)
    result = density.run(2, seconds=2.0, rate=4.0, settle=0.5)
    assert (result["workers"], result["n"], result["workers_lost"]) == (2, 8, 0)
    assert result["pss_mib_each"] > 5
    assert 0 < result["quiet_p50_ms"] <= result["quiet_p99_ms"]
    assert 0 < result["order_p50_ms"] <= result["order_p99_ms"]
    assert result["eaters_killed"] >= 1
    density.table(result)
    assert "density: 2 active workers in containers" in capsys.readouterr().out
