"""`berth bench lease` calls a lease lost only when it is."""

from __future__ import annotations

import pytest

from infra.lab.bench.starvation.lease import lost_leases


@pytest.mark.parametrize(
    ("times", "count"),
    [
        ([9.0, 11.0, 13.0, 15.0, 17.0, 19.0], 0),
        ([9.0, 15.5, 19.0], 1),
        ([4.0, 11.0, 14.0, 17.0], 1),  # the gap began before the window
        ([9.0, 11.0], 1),  # and lasts to its end
        ([9.0], 2),
        ([], 2),
    ],
)
def test_a_lease_is_lost_for_each_length_without_a_renewal(times: list[float], count: int) -> None:
    assert lost_leases(times, began=10.0, ended=20.0, lease=5.0) == count
