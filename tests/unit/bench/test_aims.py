"""The aims of the benchmarks, and the quantile of a histogram that one of them is judged by."""

from __future__ import annotations

from typing import Any

import pytest

from infra.lab.bench import aims
from infra.lab.bench.jobs.contenders import OTHER_PEERS
from infra.lab.bench.suite import BENCHMARKS
from infra.lab.bench.waits import quantile


def test_each_benchmark_has_aims() -> None:
    assert set(aims.AIMS) == set(BENCHMARKS)
    assert all(aims.AIMS.values())


def test_an_aim_is_met_or_missed_and_the_table_says_which(
    capsys: pytest.CaptureFixture[str],
) -> None:
    judged = aims.judge(aims.AIMS["claim-race"], {"double": 0, "lost": 1, "per_s": 2000})
    assert [verdict["met"] for verdict in judged] == [True, False, True]
    assert [verdict["figure"] for verdict in judged] == [0, 1, 2000]
    aims.table("claim-race", aims.AIMS["claim-race"], judged)
    shown = capsys.readouterr().out
    assert "double claims: at most 0" in shown
    assert "claims a second: at least 2000" in shown
    assert shown.count("met") == 2
    assert shown.count("missed") == 1


def test_what_was_not_measured_is_left_out() -> None:
    jobs: dict[str, Any] = {
        "peers": {"rq": {}},
        "times_rq": {"fresh": {"1": 5.0, "2": 3.9}, "recycled": {"1": 60.0}},
        "fresh": {"2": {"p50_ms": 1.0}},
        "recycled": {"1": {"p50_ms": 1.4, "p99_ms": 4.0}},
        "rerun_s": [2.5, 3.0],
        "lease_s": 2.0,
        "idle_pss_mib": 18.0,
    }
    judged = {verdict["what"]: verdict for verdict in aims.judge(aims.AIMS["jobs"], jobs)}
    assert not any("by a fresh child" in description for description in judged)
    fresh = judged["a fresh child each, times RQ"]
    assert (fresh["figure"], fresh["met"], fresh["least"]) == (3.9, False, True)
    assert judged["kill -9 to the next start, beyond the lease (s)"]["met"]
    keepers = "100 jobs a child, times the fastest peer that keeps jobs"
    assert keepers not in judged
    every: dict[str, Any] = {"peers": {peer: {} for peer in OTHER_PEERS}}
    slow = aims.judge(
        aims.AIMS["jobs"], jobs | every | {"times_fastest_keeper": {"1": 1.2, "2": 0.97}}
    )
    assert [(aim["figure"], aim["met"]) for aim in slow if aim["what"] == keepers] == [
        (0.97, False)
    ]
    assert aims.judge(aims.AIMS["maintenance"], {"sizes": {"300": {"scan_s": 9.0}}}) == []


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("claim-race", {"doubled": 0, "lost": 0, "per_s": 3000}),
        ("claim-race", {"double": None, "lost": 0, "per_s": 3000}),
        ("maintenance", {"sizes": {"10000": {"scan_s": 0.5, "whole_s": 1}}}),
        ("lease", {"200": {"lost_leases": 0}}),
        ("tiers", {}),
    ],
)
def test_an_aim_whose_figure_is_not_where_it_should_be_is_missed(
    name: str, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """As when a key of the result was renamed: the benchmark would aim at nothing."""
    judged = aims.judge(aims.AIMS[name], result)
    [missed] = [aim for aim in judged if not aim["met"]]
    assert missed["figure"] is None
    assert "the result has no such figure" in aims.describe(missed)
    aims.table(name, aims.AIMS[name], judged)
    assert "no figure, missed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.45, 0.005), (0.9, 0.01), (0.95, 0.055), (0.99, 0.091), (1.0, 0.1)],
)
def test_a_quantile_lies_within_its_bucket(share: float, expected: float) -> None:
    buckets = {0.01: 90.0, 0.1: 100.0, 1.0: 100.0, float("inf"): 100.0}
    assert quantile(buckets, share) == pytest.approx(expected)


def test_a_quantile_beyond_the_last_bound_is_that_bound_and_one_of_nothing_is_0() -> None:
    assert quantile({0.1: 1.0, 2.5: 1.0, float("inf"): 4.0}, 0.99) == 2.5
    assert quantile({0.1: 0.0, float("inf"): 0.0}, 0.99) == 0.0
    assert quantile({}, 0.99) == 0.0
