"""A session is replaced for a reason, and a tally counts recent replacements."""

from __future__ import annotations

import signal

import pytest

from worker_runtime.process.replacement import (
    CrashCounter,
    KillReason,
    record_kill,
    replacement_reason,
)
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
def test_the_end_of_the_predecessor_is_described_in_words(status: int, text: str) -> None:
    shared_state = SharedState()
    shared_state.session_number, shared_state.session_end = 2, status
    assert replacement_reason(shared_state) == text


def test_a_kill_by_the_supervisor_is_described_by_its_reason_and_for_that_session_only() -> None:
    shared_state = SharedState()
    shared_state.session_number = 1
    record_kill(shared_state, KillReason.NO_PULSE)
    shared_state.session_number, shared_state.session_end = 2, -signal.SIGKILL
    assert replacement_reason(shared_state) == "no pulse"
    shared_state.session_number = 3
    assert replacement_reason(shared_state) == "ended by SIGKILL"


def test_a_tally_counts_what_happened_of_late() -> None:
    tally = CrashCounter(3, 600.0)
    assert [tally.add_and_check() for _ in range(5)] == [False, False, False, True, True]
    forgetful = CrashCounter(0, 0.0)
    assert [forgetful.add_and_check() for _ in range(3)] == [True, True, True]
