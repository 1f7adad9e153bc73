"""Why a session was replaced, and when that has happened too often."""

from __future__ import annotations

import signal

import pytest

from worker_runtime.process.replacement import CrashCounter, KillReason, record_kill, replacement_reason
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol.launch import ExitCode


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
    board = SharedState()
    board.session_number, board.session_end = 2, status
    assert replacement_reason(board) == text


def test_a_kill_by_the_supervisor_is_told_as_its_reason_and_for_that_session_only() -> None:
    board = SharedState()
    board.session_number = 1
    record_kill(board, KillReason.NO_PULSE)
    board.session_number, board.session_end = 2, -signal.SIGKILL
    assert replacement_reason(board) == "no pulse"
    board.session_number = 3
    assert replacement_reason(board) == "ended by SIGKILL"


def test_a_tally_counts_what_happened_of_late() -> None:
    tally = CrashCounter(3, 600.0)
    assert [tally.too_many() for _ in range(5)] == [False, False, False, True, True]
    forgetful = CrashCounter(0, 0.0)
    assert [forgetful.too_many() for _ in range(3)] == [True, True, True]
