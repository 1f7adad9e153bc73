"""The list of begun submissions outlives the process that wrote it."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from worker_runtime.process.shared_state import Submissions


def test_what_a_dead_process_had_begun_is_known_to_the_next() -> None:
    submissions = Submissions()
    pid = os.fork()
    if pid == 0:
        submissions.add("o1")
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert "o1" in submissions
    assert "o2" not in submissions
    submissions.add("o2")
    assert "o2" in submissions


@given(st.lists(st.integers(0, 30), max_size=60))
def test_the_last_ids_are_remembered_and_no_other_is_made_up(numbers: list[int]) -> None:
    submissions, reader = Submissions(limit=16), Submissions(limit=16)
    for number in numbers:
        submissions.add(f"o{number}")
    for number in range(31):
        assert f"o{number}" not in reader
        if number in numbers[-16:]:
            assert f"o{number}" in submissions
        elif number not in numbers:
            assert f"o{number}" not in submissions


def test_a_full_list_forgets_the_oldest() -> None:
    submissions = Submissions(limit=3)
    for number in range(5):
        assert f"o{number}" not in submissions
        submissions.add(f"o{number}")
    assert [f"o{number}" in submissions for number in range(5)] == [False, False, True, True, True]
