"""A runner counts as dead when its beat stays the same for a lease of the observer's own time."""

from __future__ import annotations

from worker_runtime.jobs.registration import LeaseObserver


def test_a_beat_that_stands_still_for_a_lease_is_a_death() -> None:
    observer = LeaseObserver(5.0)
    now = 100.0
    deaths: list[tuple[str, bytes]] = []
    while not deaths:
        deaths = observer.check({"me": b"1", "dead": b"7", "live": str(now).encode()}, "me", now)
        now += observer.period
    assert deaths == [("dead", b"7")]
    assert 5.0 <= now - 100.0 <= 5.0 + 2 * observer.period


def test_time_without_a_check_does_not_count() -> None:
    observer = LeaseObserver(5.0)
    observer.check({"other": b"1"}, "me", 0.0)
    # Valkey was away, or this process stood still.
    assert observer.check({"other": b"1"}, "me", 1000.0) == []


def test_after_a_lost_connection_everybody_has_a_whole_lease() -> None:
    observer = LeaseObserver(1.0)
    now = 0.0
    for _ in range(18):
        assert observer.check({"other": b"1"}, "me", now) == []
        now += observer.period
    observer.pause()
    assert observer.check({"other": b"1"}, "me", now + 0.5) == []


def test_a_runner_that_left_is_forgotten() -> None:
    observer = LeaseObserver(1.0)
    observer.check({"other": b"1"}, "me", 0.0)
    assert observer.has_others()
    observer.check({"me": b"2"}, "me", 0.05)
    assert not observer.has_others()
