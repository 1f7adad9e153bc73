"""Jobs in hand that have not begun."""

from __future__ import annotations

import time

from worker_runtime.jobs.prefetch import MAX_PREFETCH_WAIT, PrefetchedJobs
from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.jobs.queue import ClaimedJob


def holding(*fences: int) -> PrefetchedJobs:
    ahead = PrefetchedJobs()
    for fence in fences:
        job_id = f"j{fence}"
        ahead.add(ClaimedJob(job_id, b"", fence, 1, 0, waited_ms=100), Job(job_id=job_id, name="n"))
    return ahead


def test_they_begin_in_the_order_of_their_claims_and_their_wait_goes_on() -> None:
    ahead = holding(1, 2)
    time.sleep(MAX_PREFETCH_WAIT)
    first = ahead.take()
    assert first.claimed.fence == 1
    assert first.waited_ms() >= 100 + MAX_PREFETCH_WAIT * 1000
    assert ahead.fences() == {2}


def test_what_has_waited_for_too_long_goes_back_and_does_not_begin() -> None:
    ahead = holding(1, 2)
    assert 0 < ahead.left() <= MAX_PREFETCH_WAIT
    assert ahead.startable()
    time.sleep(MAX_PREFETCH_WAIT)
    assert [one.claimed.fence for one in ahead.going_back()] == [1, 2]
    assert not ahead.startable()
    assert ahead.left() > 3600
    ahead.clear()
    assert not ahead
    assert not ahead.going_back()


def test_what_is_sent_back_goes_back_at_once_until_that_was_heard() -> None:
    ahead = holding(1)
    ahead.send_back()
    assert ahead.going_back()
    assert ahead.going_back()
    assert not ahead.startable()


def test_sending_nothing_back_holds_up_nothing() -> None:
    ahead = holding()
    ahead.send_back()
    ahead.add(ClaimedJob("j", b"", 1, 1, 0), Job(job_id="j", name="n"))
    assert ahead.startable()


def test_one_is_cancelled_by_its_id_and_fence() -> None:
    ahead = holding(1, 2)
    assert ahead.cancel("j1", 2) is None
    waiting = ahead.cancel("j1", 1)
    assert waiting is not None
    assert waiting.claimed.job_id == "j1"
    assert ahead.fences() == {2}


def test_what_comes_after_the_last_that_was_to_go_back_begins() -> None:
    ahead = holding(1)
    ahead.send_back()
    assert ahead.cancel("j1", 1) is not None
    ahead.add(ClaimedJob("j2", b"", 2, 1, 0), Job(job_id="j2", name="n"))
    assert ahead.startable()
