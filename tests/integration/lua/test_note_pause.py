"""A pause that a broker has asked for holds for all workers of a person, and grows while it comes
again."""

from __future__ import annotations

from typing import Any

from tests.support.lua_calls import BUDGET_OWNER, CONNECTION_KEYS, take_connection
from tests.support.lua_scripts import Scripts
from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import NOTE_PAUSE, SPEND_BUDGET

FIRST, LONGEST, GROWS_WITHIN = 60_000, 960_000, 3_600_000


def note_pause(scripts: Scripts, first: int = FIRST) -> Any:
    return scripts.run(NOTE_PAUSE, CONNECTION_KEYS[:1], first, LONGEST, GROWS_WITHIN)


def end_pause(scripts: Scripts, ago_ms: int = 1) -> None:
    """What the time of a pause does, without waiting for it."""
    seconds, micros = scripts.client.time()
    scripts.client.hset(CONNECTION_KEYS[0], "quiet_until", seconds * 1000 + micros // 1000 - ago_ms)


def test_nobody_takes_a_connection_during_a_pause(scripts: Scripts) -> None:
    assert take_connection(scripts, "u1/a", "w1")[0] == 1
    assert note_pause(scripts) == FIRST
    for connection, holder in (("u1/a", "w1"), ("u1/a", "w2"), ("u1/b", "w2")):
        granted, wait, _ = take_connection(scripts, connection, holder)
        assert (granted, FIRST - 5000 < wait <= FIRST) == (0, True)
    end_pause(scripts)
    assert take_connection(scripts, "u1/a", "w2")[0] == 1


def test_no_worker_of_the_person_makes_a_call_during_a_pause(scripts: Scripts) -> None:
    window = (1, 5000, 25, 0)  # one query; the span in ms, the limit, the reserve

    def spend(call: str) -> list[Any]:
        names = [CONNECTION_KEYS[0], keys.budget(BUDGET_OWNER, "queries")]
        reply: list[Any] = scripts.run(SPEND_BUDGET, names, call, "", 1, 0, *window)
        return reply

    assert spend("w1:1:1")[0] == 1
    note_pause(scripts)
    granted, wait, _, _ = spend("w2:1:1")
    assert (granted, FIRST - 5000 < wait <= FIRST) == (0, True)
    end_pause(scripts)
    assert spend("w2:1:1")[0] == 1


def test_two_accounts_that_meet_the_same_pause_do_not_make_it_longer(scripts: Scripts) -> None:
    note_pause(scripts)
    assert FIRST - 5000 < note_pause(scripts) <= FIRST


def test_a_pause_that_comes_again_is_twice_as_long_up_to_a_bound(scripts: Scripts) -> None:
    pauses = []
    for _ in range(7):
        pauses.append(note_pause(scripts))
        end_pause(scripts)
    assert pauses == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST, LONGEST, LONGEST, LONGEST]
    end_pause(scripts, ago_ms=GROWS_WITHIN + 60_000)
    assert note_pause(scripts) == FIRST


def test_no_worker_silences_its_user_for_longer_than_an_hour(scripts: Scripts) -> None:
    assert scripts.run(NOTE_PAUSE, CONNECTION_KEYS[:1], 10**15, 10**15, 10**15) == 3_600_000
