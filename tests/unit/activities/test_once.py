"""Things are said once, and the memory of it is bounded."""

from __future__ import annotations

from activities.events.stream import LogDeduplicator


def test_a_thing_is_new_once() -> None:
    once = LogDeduplicator()
    assert [once.new(thing) for thing in ("a", "b", "a", "a")] == [True, True, False, False]


def test_what_was_said_long_ago_may_be_said_again() -> None:
    once = LogDeduplicator(kept=2)
    assert [once.new(thing) for thing in ("a", "b", "a", "c", "a", "b")] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]
