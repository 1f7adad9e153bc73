from __future__ import annotations

import random
from fractions import Fraction
from math import ceil

import pytest

from infra.lab.figures import milliseconds, percentile


@pytest.mark.parametrize("count", [10, 30, 100, 2000])
@pytest.mark.parametrize("share", [50, 90, 99])
def test_a_percentile_is_the_value_at_the_nearest_rank(count: int, share: int) -> None:
    values = [float(rank) for rank in range(1, count + 1)]
    random.Random(count).shuffle(values)  # noqa: S311
    assert percentile(values, share / 100) == ceil(Fraction(share, 100) * count)


def test_the_ends_are_the_least_and_the_greatest_value() -> None:
    assert percentile([3.0, 1.0, 2.0], 0) == 1.0
    assert percentile([3.0, 1.0, 2.0], 1) == 3.0
    assert percentile([7.0], 0.5) == 7.0


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_durations_become_milliseconds_under_the_percentiles_name() -> None:
    assert milliseconds([0.001, 0.0123456], 50, 99) == {"p50_ms": 1.0, "p99_ms": 12.35}
