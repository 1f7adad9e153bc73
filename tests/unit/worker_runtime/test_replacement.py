"""Why a session was replaced, and when that has happened too often."""

from __future__ import annotations

import signal

import pytest

from worker_runtime.board import Board
from worker_runtime.protocol.exit_codes import ExitCode
from worker_runtime.replacement import KillReason, Tally, note_kill, why


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (-signal.SIGSEGV, "ended by SIGSEGV"),
        (-40, "ended by signal 40"),
        (ExitCode.SESSION_REPLACE, "the broker's SDK did not come back"),
        (ExitCode.INTERNAL, "ended with code 65"),
    ],
)
def test_the_end_of_the_predecessor_is_told_in_words(status: int, text: str) -> None:
    board = Board()
    board.session_number, board.session_end = 2, status
    assert why(board) == text


def test_a_kill_by_the_supervisor_is_told_as_its_reason_and_for_that_session_only() -> None:
    board = Board()
    board.session_number = 1
    note_kill(board, KillReason.NO_PULSE)
    board.session_number, board.session_end = 2, -signal.SIGKILL
    assert why(board) == "no pulse"
    board.session_number = 3
    assert why(board) == "ended by SIGKILL"


def test_a_tally_counts_what_happened_of_late() -> None:
    tally = Tally(3, 600.0)
    assert [tally.too_many() for _ in range(5)] == [False, False, False, True, True]
    forgetful = Tally(0, 0.0)
    assert [forgetful.too_many() for _ in range(3)] == [True, True, True]
