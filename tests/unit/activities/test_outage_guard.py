"""Maintenance holds still in an outage, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from activities.maintenance.anomalies import (
    MAX_ANOMALIES_WITHOUT_OUTAGE,
    MAX_PASS_AGE_S,
    ScanSummary,
    guard_reason,
)
from infra.database.workers.passes import PassBasis, PassRecord

PLACE = PassBasis(generation="g", server="s", tasks=100)
SCAN = ScanSummary(place=PLACE, size=100, anomalies=5, in_service=80, unmarked=0, unlisted=0)
BEFORE = PassRecord(id=1, place=PLACE, age=60.0, boot="b", boottime=1.0, guarded="")


def test_in_quiet_times_it_may_act() -> None:
    assert guard_reason(SCAN, BEFORE) == ""


@pytest.mark.parametrize(
    ("scan", "before", "why"),
    [
        (replace(SCAN, place=replace(PLACE, generation="")), BEFORE, "the generation is missing"),
        (replace(SCAN, place=replace(PLACE, generation="h")), BEFORE, "the generation has changed"),
        (replace(SCAN, place=replace(PLACE, server="t")), BEFORE, "Valkey was restarted"),
        (SCAN, None, "the first pass in a while"),
        (SCAN, replace(BEFORE, age=MAX_PASS_AGE_S + 1), "the first pass in a while"),
        (
            SCAN,
            replace(BEFORE, place=PassBasis(), guarded="Valkey could not be read"),
            "the pass before could not read",
        ),
        (
            replace(SCAN, place=replace(PLACE, tasks=80)),
            BEFORE,
            "the launcher lists far fewer tasks",
        ),
        (
            replace(SCAN, place=replace(PLACE, tasks=0)),
            BEFORE,
            "the launcher lists far fewer tasks",
        ),
        (replace(SCAN, unlisted=20), BEFORE, "the launcher does not list living workers"),
        (replace(SCAN, unmarked=16), BEFORE, "many marks are missing"),
        (replace(SCAN, anomalies=20), BEFORE, "too many anomalies at once"),
    ],
)
def test_in_doubt_it_may_not(scan: ScanSummary, before: PassRecord | None, why: str) -> None:
    assert guard_reason(scan, before) == why


@pytest.mark.parametrize(
    ("scan", "before", "why"),
    [
        (replace(SCAN, place=replace(PLACE, tasks=0)), BEFORE, ""),
        (replace(SCAN, unlisted=20), BEFORE, ""),
        (replace(SCAN, unmarked=80), replace(BEFORE, guarded="many marks are missing"), ""),
        (replace(SCAN, anomalies=100), BEFORE, ""),
        (replace(SCAN, place=replace(PLACE, generation="h")), BEFORE, "the generation has changed"),
        (replace(SCAN, place=replace(PLACE, server="t")), BEFORE, "Valkey was restarted"),
        (SCAN, None, "the first pass in a while"),
    ],
)
def test_an_operator_overrides_what_looks_odd_but_not_what_cannot_be_compared(
    scan: ScanSummary, before: PassRecord | None, why: str
) -> None:
    assert guard_reason(scan, before, override=True) == why


def test_a_few_odd_workers_are_no_outage_however_small_the_fleet() -> None:
    small = replace(
        SCAN,
        size=4,
        in_service=4,
        anomalies=MAX_ANOMALIES_WITHOUT_OUTAGE,
        unmarked=MAX_ANOMALIES_WITHOUT_OUTAGE,
        unlisted=MAX_ANOMALIES_WITHOUT_OUTAGE,
    )
    assert guard_reason(small, BEFORE) == ""
    assert (
        guard_reason(replace(small, anomalies=MAX_ANOMALIES_WITHOUT_OUTAGE + 1), BEFORE)
        == "too many anomalies at once"
    )
