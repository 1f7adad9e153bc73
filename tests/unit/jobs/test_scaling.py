"""A fleet has as many runners as its waiting jobs need."""

import pytest
from pydantic import ValidationError

from infra.jobs.scaling import wanted_runners
from infra.settings import Settings


@pytest.mark.parametrize(
    ("runners", "waited", "expected"),
    [(1, 0.0, 1), (1, 5.0, 1), (1, 5.1, 2), (2, 6.0, 3), (4, 7.5, 6), (4, 1e9, 8), (3, 4.9, 3)],
)
def test_a_fleet_grows_by_as_much_as_its_jobs_wait_too_long(
    runners: int, waited: float, expected: int
) -> None:
    assert wanted_runners(runners, waited, 5.0) == expected


@pytest.mark.parametrize(("text", "bounds"), [("1", (1, 1)), ("2-5", (2, 5)), ("4-2", (4, 4))])
def test_bounds_are_one_number_or_two(text: str, bounds: tuple[int, int]) -> None:
    assert Settings(jobs_runners=text).runner_bounds == bounds


@pytest.mark.parametrize("text", ["", "0", "1-", "-2", "a", "1-0", "9999"])
def test_a_text_that_is_not_a_number_of_runners_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        Settings(jobs_runners=text)
