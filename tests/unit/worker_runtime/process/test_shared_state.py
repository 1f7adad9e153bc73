from __future__ import annotations

import os

import pytest

from worker_runtime.process.clock import NS_PER_S, boot_ns
from worker_runtime.process.shared_state import (
    LEASE_MARGIN_S,
    NO_KEYS,
    Lease,
    SharedState,
    SharedStateOverflow,
    lease_end_of,
)
from worker_runtime.protocol.authentication import AssignmentKeys, MessageKey


def test_what_a_child_writes_is_seen_by_its_parent() -> None:
    shared_state = SharedState()
    pid = os.fork()
    if pid == 0:
        shared_state.assign("user-1", "claim-1", 7)
        shared_state.pulse = -5
        os._exit(0)
    os.waitpid(pid, 0)
    assert (
        shared_state.user_id,
        shared_state.claim_id,
        shared_state.epoch,
        shared_state.assigned,
    ) == (
        "user-1",
        "claim-1",
        7,
        1,
    )
    assert shared_state.pulse == -5


def test_a_public_key_belongs_to_one_session_only() -> None:
    shared_state = SharedState()
    assert shared_state.public_key() == b""
    shared_state.session_number = 1
    shared_state.publish_key(bytes(range(32)))
    assert shared_state.public_key() == bytes(range(32))
    shared_state.session_number = 2
    assert shared_state.public_key() == b""


def test_later_message_keys_replace_earlier_ones_in_every_process() -> None:
    shared_state = SharedState()
    assert shared_state.message_keys() == NO_KEYS
    for version in (1, 2, 3):
        key = MessageKey(version, bytes([version]) * 32)
        pid = os.fork()
        if pid == 0:
            shared_state.write_message_keys(AssignmentKeys(request=(key,), assignment=(key, key)))
            os._exit(0)
        os.waitpid(pid, 0)
        assert shared_state.message_keys() == AssignmentKeys(request=(key,), assignment=(key, key))


def test_sequences_of_session_and_supervisor_never_meet_and_always_grow() -> None:
    shared_state = SharedState()
    takes = [shared_state.next_session_event, shared_state.next_supervisor_event]
    drawn = [takes[which]() for which in (0, 1, 1, 0, 0, 0, 1, 0, 1, 1)]
    assert drawn == sorted(set(drawn))
    assert {number % 2 for number in drawn[0:1] + drawn[3:6]} == {0}


def test_an_id_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SharedStateOverflow):
        SharedState().assign("ü" * 200, "c", 1)


def test_an_unrenewed_lease_allows_nothing() -> None:
    lease = Lease(SharedState())
    assert lease.remaining_s() < 0
    assert lease.usable() < 0


def test_a_lease_is_usable_until_its_margin() -> None:
    shared_state = SharedState()
    lease = Lease(shared_state)
    began = boot_ns()
    shared_state.lease_supervisor = lease_end_of(began, 30.0)
    usable = lease.usable()
    passed = (boot_ns() - began) / NS_PER_S
    assert 30.0 - LEASE_MARGIN_S - passed - 0.001 < usable <= 30.0 - LEASE_MARGIN_S
    shared_state.lease_supervisor = boot_ns() + int((LEASE_MARGIN_S - 0.1) * NS_PER_S)
    assert lease.usable() < 0 < lease.remaining_s()


def test_a_renewal_by_either_process_counts() -> None:
    shared_state = SharedState()
    shared_state.lease_session = lease_end_of(boot_ns(), 20.0)
    shared_state.lease_supervisor = lease_end_of(boot_ns(), 10.0)
    assert Lease(shared_state).remaining_s() > 15.0


def test_a_fenced_worker_may_call_nothing() -> None:
    shared_state = SharedState()
    shared_state.lease_supervisor = lease_end_of(boot_ns(), 30.0)
    shared_state.fenced = 1
    assert Lease(shared_state).usable() <= 0
