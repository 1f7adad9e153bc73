"""Things are said once, and the memory of it is bounded."""

from __future__ import annotations

from activities.once import Once


def test_a_thing_is_new_once() -> None:
    once = Once()
    assert [once.new(thing) for thing in ("a", "b", "a", "a")] == [True, True, False, False]


def test_what_was_said_long_ago_may_be_said_again() -> None:
    once = Once(kept=2)
    assert [once.new(thing) for thing in ("a", "b", "a", "c", "a", "b")] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]
