"""The request path's scripts: in order, once, and only for the owner."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.lua_calls import USER, enqueue_request, pop_request, renew_mark, set_owner
from tests.support.lua_scripts import Scripts
from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import (
    ANSWER,
    PUT_BACK,
    REMOVE_MARK,
    SEND_CONTROL,
    WITHDRAW,
)


def answer(scripts: Scripts, request: str, item: str, text: str = "done") -> Any:
    return scripts.run(ANSWER, keys.answering(USER, request), item, text, 60, "channel")


def withdraw(scripts: Scripts, request: str, item: str) -> Any:
    return scripts.run(WITHDRAW, keys.withdrawing(USER, request), item, "withdrawn", 60)


def test_a_request_is_enqueued_once_whatever_is_repeated(scripts: Scripts) -> None:
    first, again = enqueue_request(scripts, "r"), enqueue_request(scripts, "r")
    assert (first[0], again[0]) == (1, 0)
    assert first[1] == again[1]
    assert scripts.client.llen(keys.requests(USER)) == 1


def test_a_repeat_after_the_answer_is_still_a_repeat(scripts: Scripts) -> None:
    set_owner(scripts)
    item = enqueue_request(scripts, "r")[1]
    pop_request(scripts, 1)
    answer(scripts, "r", item)
    assert enqueue_request(scripts, "r")[0] == 0
    assert pop_request(scripts, 2)[0] == "empty"


def test_enqueue_tells_whether_a_worker_is_there(scripts: Scripts) -> None:
    assert enqueue_request(scripts, "r1")[2] == 0
    set_owner(scripts)
    renew_mark(scripts)
    assert enqueue_request(scripts, "r2")[2] == 1


def test_requests_come_out_in_the_order_they_went_in(scripts: Scripts) -> None:
    set_owner(scripts)
    for number in range(4):
        enqueue_request(scripts, f"r{number}")
    popped = [pop_request(scripts, number)[1].split("|")[1] for number in range(4)]
    assert popped == ["r0", "r1", "r2", "r3"]


def test_a_lost_reply_is_repeated_and_gives_the_same_item(scripts: Scripts) -> None:
    set_owner(scripts)
    enqueue_request(scripts, "r0")
    enqueue_request(scripts, "r1")
    assert pop_request(scripts, 1)[1] == pop_request(scripts, 1)[1]
    assert pop_request(scripts, 2)[1].split("|")[1] == "r1"


def test_a_late_older_pop_takes_nothing(scripts: Scripts) -> None:
    set_owner(scripts)
    enqueue_request(scripts, "r0")
    pop_request(scripts, 2)
    enqueue_request(scripts, "r1")
    assert pop_request(scripts, 1) == ["stale", "", 0, "g"]
    assert scripts.client.llen(keys.requests(USER)) == 1
    assert pop_request(scripts, 10)[1].split("|")[1] == "r1"
    assert pop_request(scripts, 9)[0] == "stale"  # by number, not by text
    # Another session counts on its own.
    assert pop_request(scripts, 1, session="next")[0] == "empty"


def test_an_empty_pop_is_remembered_by_its_number_alone(scripts: Scripts) -> None:
    set_owner(scripts)
    assert pop_request(scripts, 2)[0] == "empty"
    assert pop_request(scripts, 2)[0] == "empty"
    enqueue_request(scripts, "r")
    assert pop_request(scripts, 1)[0] == "stale"
    item = pop_request(scripts, 2)
    assert item[0] == "request"
    assert pop_request(scripts, 2)[1] == item[1]


def test_control_messages_overtake_requests(scripts: Scripts) -> None:
    set_owner(scripts)
    enqueue_request(scripts, "r")
    scripts.run(SEND_CONTROL, [keys.control(USER), keys.doorbell(USER)], "stop")
    assert pop_request(scripts, 1)[:2] == ["control", "stop"]
    assert pop_request(scripts, 1)[:2] == ["control", "stop"]
    assert pop_request(scripts, 2)[0] == "request"


def test_a_pop_for_control_messages_leaves_the_requests_where_they_are(scripts: Scripts) -> None:
    set_owner(scripts)
    enqueue_request(scripts, "r1")
    assert pop_request(scripts, 1, "control")[0] == "empty"
    scripts.run(SEND_CONTROL, [keys.control(USER), keys.doorbell(USER)], "stop")
    assert pop_request(scripts, 2, "control")[:2] == ["control", "stop"]
    assert pop_request(scripts, 2, "control")[:2] == ["control", "stop"]
    assert scripts.client.llen(keys.requests(USER)) == 1
    assert pop_request(scripts, 3, "")[0] == "request"


def test_a_late_pop_of_a_dead_session_of_the_same_worker_takes_nothing(scripts: Scripts) -> None:
    set_owner(scripts)
    assert pop_request(scripts, 7, "control", session="w:2")[0] == "empty"
    enqueue_request(scripts, "r1")
    assert pop_request(scripts, 6, session="w:1")[0] == "stale"
    assert pop_request(scripts, 8, session="w:2")[0] == "request"


def test_the_pops_of_another_worker_start_anew(scripts: Scripts) -> None:
    set_owner(scripts)
    assert pop_request(scripts, 7, session="w:1")[0] == "empty"
    set_owner(scripts, epoch=2, worker="w2")
    enqueue_request(scripts, "r1")
    assert pop_request(scripts, 1, epoch=2, worker="w2", session="w2:1")[0] == "request"


def test_only_the_owner_pops(scripts: Scripts) -> None:
    enqueue_request(scripts, "r")
    assert pop_request(scripts, 1)[0] == "no_owner"
    set_owner(scripts, epoch=2)
    assert pop_request(scripts, 1, epoch=1)[0] == "fenced"
    assert pop_request(scripts, 1, epoch=2, worker="other")[0] == "fenced"
    assert scripts.client.llen(keys.requests(USER)) == 1
    assert pop_request(scripts, 1, epoch=2)[0] == "request"


def put_back(
    scripts: Scripts, item: str, number: int, *, epoch: int = 1, session: str = "s"
) -> Any:
    order = item.split("|")[1]
    names = [keys.owner(USER), keys.requests(USER), keys.processing(USER)]
    names += [keys.journal(USER, order), keys.pop(USER)]
    return scripts.run(PUT_BACK, names, epoch, "w", session, number, item)


def test_what_is_put_back_is_the_next_request_again(scripts: Scripts) -> None:
    set_owner(scripts)
    enqueue_request(scripts, "r1")
    enqueue_request(scripts, "r2")
    item = pop_request(scripts, 1)[1]
    assert put_back(scripts, item, 1) == "queued"
    assert put_back(scripts, item, 1) == "queued"  # a repeat after a lost reply
    assert scripts.client.llen(keys.processing(USER)) == 0
    assert scripts.client.llen(keys.requests(USER)) == 2
    assert pop_request(scripts, 2)[1] == item


def test_what_valkey_has_lost_is_not_put_back(scripts: Scripts) -> None:
    set_owner(scripts)
    item = enqueue_request(scripts, "r1")[1]
    pop_request(scripts, 1)
    scripts.client.delete(keys.processing(USER))
    assert put_back(scripts, item, 1) == "gone"
    assert scripts.client.llen(keys.requests(USER)) == 0


def test_nothing_is_put_back_late_by_another_or_after_its_journal(scripts: Scripts) -> None:
    set_owner(scripts)
    item = enqueue_request(scripts, "r1")[1]
    pop_request(scripts, 1)
    put_back(scripts, item, 1)
    assert pop_request(scripts, 2)[1] == item
    put_back(scripts, item, 1)  # the first call, delivered late: nobody reads its reply
    assert put_back(scripts, item, 2, session="next") == "left"
    set_owner(scripts, epoch=2)
    assert put_back(scripts, item, 2) == "gone"  # the successor answers what it finds in processing
    set_owner(scripts, epoch=2)
    scripts.client.set(keys.journal(USER, "r1"), "1")
    assert put_back(scripts, item, 2, epoch=2) == "left"
    assert scripts.client.llen(keys.processing(USER)) == 1
    assert scripts.client.llen(keys.requests(USER)) == 0


def test_the_remaining_time_is_measured_by_the_servers_clock(scripts: Scripts) -> None:
    set_owner(scripts)
    enqueue_request(scripts, "r", ttl=60_000)
    assert 50_000 < pop_request(scripts, 1)[2] <= 60_000


def test_a_late_request_comes_out_with_no_time_left(scripts: Scripts) -> None:
    set_owner(scripts)
    enqueue_request(scripts, "r", ttl=1)
    scripts.client.blpop(["nothing"], 0.05)  # lets the deadline pass on the server
    assert pop_request(scripts, 1)[2] < 0


def test_a_withdrawn_request_is_never_popped_and_a_popped_one_cannot_be_withdrawn(
    scripts: Scripts,
) -> None:
    set_owner(scripts)
    first, second = enqueue_request(scripts, "r0")[1], enqueue_request(scripts, "r1")[1]
    assert withdraw(scripts, "r0", first) == 1
    assert scripts.client.get(keys.response(USER, "r0")) == b"withdrawn"
    assert withdraw(scripts, "r0", first) == 0
    assert pop_request(scripts, 1)[1] == second
    assert withdraw(scripts, "r1", second) == 0
    assert scripts.client.get(keys.response(USER, "r1")) is None


def test_an_answer_ends_processing_and_may_be_repeated(scripts: Scripts) -> None:
    set_owner(scripts)
    item = enqueue_request(scripts, "r")[1]
    pop_request(scripts, 1)
    assert scripts.client.lrange(keys.processing(USER), 0, -1) == [item.encode()]
    assert (answer(scripts, "r", item), answer(scripts, "r", item)) == ([1, 0], [0, 0])
    assert scripts.client.llen(keys.processing(USER)) == 0
    assert scripts.client.get(keys.response(USER, "r")) == b"done"
    assert 0 < scripts.client.ttl(keys.response(USER, "r")) <= 60


def test_an_older_epoch_can_neither_own_nor_mark(scripts: Scripts) -> None:
    assert set_owner(scripts, epoch=2) == "ok"
    assert set_owner(scripts, epoch=2) == "ok"
    assert set_owner(scripts, epoch=2, worker="other") == "older"
    assert set_owner(scripts, epoch=1) == "older"
    assert renew_mark(scripts, epoch=1) == "fenced"
    assert renew_mark(scripts, epoch=2) == "ok"
    assert scripts.client.hget(keys.metadata(USER), "task") == b"t"
    assert set_owner(scripts, epoch=3, worker="next") == "ok"
    assert renew_mark(scripts, epoch=2) == "fenced"


def test_a_worker_without_an_owner_key_gets_no_mark(scripts: Scripts) -> None:
    assert renew_mark(scripts) == "no_owner"
    assert scripts.client.exists(keys.mark(USER)) == 0


def test_a_worker_removes_its_own_mark_only(scripts: Scripts) -> None:
    set_owner(scripts, epoch=2)
    renew_mark(scripts, epoch=2)
    places = [keys.mark(USER), keys.metadata(USER)]
    assert scripts.run(REMOVE_MARK, places, "1:w") == 0
    assert scripts.run(REMOVE_MARK, places, "2:w") == 1
    assert scripts.client.exists(*places) == 0


class RequestQueueMachine(RuleBasedStateMachine):
    """Any mix of enqueue, pop, lost replies and answers: each request is popped once, in order."""

    scripts: Scripts

    @initialize()
    def start(self) -> None:
        self.scripts.client.flushall()
        set_owner(self.scripts)
        self.queued: list[str] = []
        self.processing: dict[str, str] = {}
        self.answered: set[str] = set()
        self.number = 0
        #: Reply to the last pop; None while there was none.
        self.last: Any = None

    @rule(name=st.sampled_from([f"r{n}" for n in range(6)]))
    def enqueue(self, name: str) -> None:
        known = name in self.queued or name in self.processing or name in self.answered
        assert enqueue_request(self.scripts, name)[0] == (0 if known else 1)
        if not known:
            self.queued.append(name)

    @rule()
    def pop(self) -> None:
        self.number += 1
        reply = pop_request(self.scripts, self.number)
        self.took_the_next(reply)

    def took_the_next(self, reply: Any) -> None:
        self.last = reply
        if not self.queued:
            assert reply[0] == "empty"
            return
        expected = self.queued.pop(0)
        assert reply[1].split("|")[1] == expected
        self.processing[expected] = reply[1]

    @precondition(lambda self: self.last is not None)
    @rule()
    def repeat_the_last_pop(self) -> None:
        again = pop_request(self.scripts, self.number)
        if self.last[0] == "empty":  # the repeat looks anew
            self.took_the_next(again)
        else:
            assert again[1] == self.last[1]

    @precondition(lambda self: self.number > 0)
    @rule(data=st.data())
    def an_older_pop_comes_late(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.number - 1))
        assert pop_request(self.scripts, number) == ["stale", "", 0, "g"]

    @precondition(lambda self: bool(self.processing))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.processing)))
        assert answer(self.scripts, name, self.processing.pop(name)) == [1, 1 if self.queued else 0]
        self.answered.add(name)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "queued"):
            return

        def items(key: str) -> list[bytes]:
            return cast("list[bytes]", self.scripts.client.lrange(key, 0, -1))

        waiting = [str(item, "utf-8").split("|")[1] for item in items(keys.requests(USER))]
        assert waiting[::-1] == self.queued
        assert set(items(keys.processing(USER))) == {
            item.encode() for item in self.processing.values()
        }


def test_no_sequence_of_calls_loses_or_doubles_a_request(scripts: Scripts) -> None:
    RequestQueueMachine.scripts = scripts
    run_state_machine_as_test(
        RequestQueueMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
