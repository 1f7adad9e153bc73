"""A broker's list proves what the broker's record says, and never more."""

from __future__ import annotations

import pytest

from worker_runtime.brokers.port import ConnectionKey, Listing
from worker_runtime.trading.reconciliation import build_report, proven_by

#: An adapter that claims all.
CLAIMED = Listing([], behind=0.0, reaches=1e9, positions_agree=True)


@pytest.mark.parametrize(
    ("broker", "simulation", "behind", "reaches", "agree"),
    [
        ("paper", True, 0.0, 1e9, True),
        ("shioaji", False, 0.0, 86_400.0, False),
        # A simulation's session does not see the orders of others.
        ("shioaji", True, None, 86_400.0, False),
        ("not installed", True, 0.0, 1e9, True),
    ],
)
def test_what_an_adapter_claims_beyond_the_record_does_not_count(
    broker: str, simulation: bool, behind: float | None, reaches: float, agree: bool
) -> None:
    key = ConnectionKey(broker, "stock", simulation, "a1")
    listing = proven_by(CLAIMED, key)
    assert listing == Listing([], behind, reaches, agree)
    report = build_report(
        "a1", listing, taken_at_ms=0, complete=True, orders=[], positions=[], balance=None
    )
    assert report.absence_certain is (behind is not None)
    assert report.positions_agree is (agree and behind is not None)


def test_what_an_adapter_cannot_tell_stays_unknown() -> None:
    key = ConnectionKey("paper", "stock", True, "a1")
    assert proven_by(Listing([]), key) == Listing([])
