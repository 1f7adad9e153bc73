from __future__ import annotations

import pytest

from infra.lab.bench.starvation.renewal_watch import judge_renewals


def test_no_renewal_on_its_time_is_late() -> None:
    report = judge_renewals([5.0, 10.0, 15.9, 21.8], began=1.0, ended=25.0, period=5.0)
    assert (report.count, report.late, report.max_gap) == (4, 0, 5.9)


@pytest.mark.parametrize(("gap", "late"), [(6.0, 1), (10.9, 1), (11.0, 2), (60.0, 11), (5.99, 0)])
def test_each_renewal_that_is_a_second_over_its_time_counts_as_late(gap: float, late: int) -> None:
    assert judge_renewals([0.0, gap], began=0.0, ended=gap, period=5.0).late == late


def test_who_never_renews_is_late_with_every_renewal_of_the_window() -> None:
    assert judge_renewals([], began=100.0, ended=160.0, period=5.0).late == 11


def test_a_renewal_before_the_window_sets_the_time_of_the_first_one_in_it() -> None:
    assert judge_renewals([2.0, 9.0], began=4.0, ended=10.0, period=5.0).late == 1
    assert judge_renewals([2.0, 7.0], began=4.0, ended=10.0, period=5.0).late == 0


def test_a_gap_at_the_end_of_the_window_counts() -> None:
    report = judge_renewals([1.0], began=0.0, ended=20.0, period=5.0)
    assert (report.late, report.max_gap) == (3, 19.0)
