"""The doorbell: one ring for all that waits, and another one when the first went to nobody."""

from __future__ import annotations

from tests.support.lua_calls import USER, enqueue_request, renew_mark, set_owner
from tests.support.lua_scripts import Scripts
from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import RING_DOORBELL


def test_the_doorbell_holds_one_ring_however_many_requests_come(scripts: Scripts) -> None:
    for number in range(5):
        enqueue_request(scripts, f"r{number}")
    assert scripts.client.llen(keys.doorbell(USER)) == 1


def test_a_ring_that_was_lost_is_repeated_while_requests_wait(scripts: Scripts) -> None:
    set_owner(scripts)
    names = [keys.requests(USER), keys.doorbell(USER), keys.mark(USER), keys.control(USER)]
    assert scripts.run(RING_DOORBELL, names) == 0
    assert scripts.client.llen(keys.doorbell(USER)) == 0  # nothing waits
    enqueue_request(scripts, "r")
    scripts.client.lpop(keys.doorbell(USER))  # by a worker that is frozen
    renew_mark(scripts)
    for _ in range(2):
        assert scripts.run(RING_DOORBELL, names) == 1
    assert scripts.client.llen(keys.doorbell(USER)) == 1


def test_a_control_message_is_rung_for_again(scripts: Scripts) -> None:
    set_owner(scripts)
    scripts.client.lpush(keys.control(USER), "reload")
    scripts.run(
        RING_DOORBELL,
        [keys.requests(USER), keys.doorbell(USER), keys.mark(USER), keys.control(USER)],
    )
    assert scripts.client.llen(keys.doorbell(USER)) == 1


def test_a_repeated_request_rings_again_while_it_waits(scripts: Scripts) -> None:
    set_owner(scripts)
    enqueue_request(scripts, "r")
    scripts.client.lpop(keys.doorbell(USER))
    assert enqueue_request(scripts, "r")[0] == 0
    assert scripts.client.llen(keys.doorbell(USER)) == 1
    scripts.client.delete(keys.doorbell(USER), keys.requests(USER))  # it was popped
    enqueue_request(scripts, "r")
    assert scripts.client.llen(keys.doorbell(USER)) == 0
