from __future__ import annotations

import os

import pytest

from worker_runtime.process.clock import SECOND, boot_ns
from worker_runtime.process.lease import LEASE_MARGIN, Lease, lease_end_of
from worker_runtime.process.shared_state import SharedState, SharedStateOverflow


def test_what_a_child_writes_is_seen_by_its_parent() -> None:
    board = SharedState()
    pid = os.fork()
    if pid == 0:
        board.assign("user-1", "claim-1", 7)
        board.pulse = -5
        os._exit(0)
    os.waitpid(pid, 0)
    assert (board.user_id, board.claim_id, board.epoch, board.assigned) == ("user-1", "claim-1", 7, 1)
    assert board.pulse == -5


def test_a_public_key_belongs_to_one_session_only() -> None:
    board = SharedState()
    assert board.public_key() == b""
    board.session_number = 1
    board.publish_key(bytes(range(32)))
    assert board.public_key() == bytes(range(32))
    board.session_number = 2
    assert board.public_key() == b""


def test_sequences_of_session_and_supervisor_never_meet_and_always_grow() -> None:
    board = SharedState()
    takes = [board.next_session_event, board.next_supervisor_event]
    drawn = [takes[which]() for which in (0, 1, 1, 0, 0, 0, 1, 0, 1, 1)]
    assert drawn == sorted(set(drawn))
    assert {number % 2 for number in drawn[0:1] + drawn[3:6]} == {0}


def test_an_id_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SharedStateOverflow):
        SharedState().assign("ü" * 200, "c", 1)


def test_an_unrenewed_lease_allows_nothing() -> None:
    lease = Lease(SharedState())
    assert lease.left() < 0
    assert lease.usable() < 0


def test_a_lease_is_usable_until_its_margin() -> None:
    board = SharedState()
    lease = Lease(board)
    began = boot_ns()
    board.lease_supervisor = lease_end_of(began, 30.0)
    usable = lease.usable()
    passed = (boot_ns() - began) / SECOND
    assert 30.0 - LEASE_MARGIN - passed - 0.001 < usable <= 30.0 - LEASE_MARGIN
    board.lease_supervisor = boot_ns() + int((LEASE_MARGIN - 0.1) * SECOND)
    assert lease.usable() < 0 < lease.left()


def test_a_renewal_by_either_process_counts() -> None:
    board = SharedState()
    board.lease_session = lease_end_of(boot_ns(), 20.0)
    board.lease_supervisor = lease_end_of(boot_ns(), 10.0)
    assert Lease(board).left() > 15.0


def test_a_fenced_worker_may_call_nothing() -> None:
    board = SharedState()
    board.lease_supervisor = lease_end_of(boot_ns(), 30.0)
    board.fenced = 1
    assert Lease(board).usable() <= 0
