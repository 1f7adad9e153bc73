"""What runners of an application announce, and which jobs their claims take."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs.hand_runner import make_manifest
from tests.support.jobs.queue import QueueHarness
from tests.support.message_signing import SECRETS
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import manifest as wire
from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.jobs.queue import JobQueue, RunnerIdentity
from worker_runtime.process.valkey import Valkey
from worker_runtime.protocol.errors import InvalidSignature, MalformedMessage

TAG = job_keys.application_tag("shop")
KEYS = SECRETS.job_keys(TAG)


def a_runner(harness: QueueHarness, name: str, *manifests: bytes) -> JobQueue:
    client = Valkey(harness.url, timeout=25)
    harness._clients.append(client)
    queue = JobQueue(client, RunnerIdentity(f"{name}-1", name, "n"), TAG)
    queue.join()
    if manifests:
        assert announce(harness, queue, *manifests)
    return queue


def announce(harness: QueueHarness, queue: JobQueue, *manifests: bytes) -> bool:
    reply = harness.call(wire.publish(queue.identity.runner_id, manifests, KEYS, "shop"))
    return wire.check_reply(reply)


def enqueue(harness: QueueHarness, job_id: str, name: str, version: int = 1, **fields: Any) -> None:
    job = Job(job_id=job_id, name=f"shop/{name}", type_version=version, **fields)
    assert harness.call(job_calls.enqueue(job, KEYS, TAG))[0] == "queued"


def claimed(queue: JobQueue, count: int = 10) -> list[str]:
    claims = queue.finish_and_claim([], count)[1]
    assert claims is not None
    return [job.job_id for job in claims.jobs]


def test_a_runner_takes_only_jobs_of_types_and_versions_that_it_has_announced(
    harness: QueueHarness,
) -> None:
    first = a_runner(harness, "first", make_manifest("resize"))
    second = a_runner(harness, "second", make_manifest("resize", version=2))
    enqueue(harness, "unknown", "send")
    enqueue(harness, "old", "resize")
    enqueue(harness, "new", "resize", version=2)
    assert claimed(first) == ["old"]
    assert claimed(second) == ["new"]
    # It waits, and has lost no attempt.
    state = harness.client.execute("HMGET", job_keys.job(TAG, "unknown"), "state", "attempt")
    assert state == [b"waiting", b"0"]
    third = a_runner(harness, "third", make_manifest("send"))
    assert claimed(third) == ["unknown"]


def test_a_ring_that_comes_to_a_runner_without_the_type_wakes_one_that_has_it(
    harness: QueueHarness,
) -> None:
    first = a_runner(harness, "first", make_manifest("resize"))
    second = a_runner(harness, "second", make_manifest("send"))
    for queue in (first, second):
        assert claimed(queue) == []
        queue.renew("idle", ())
    enqueue(harness, "1", "send")
    assert claimed(first) == []
    assert harness.client.execute("LRANGE", second.mailbox(), 0, -1) == [b"check"]
    assert claimed(first) == []  # and once is enough
    assert harness.client.execute("LLEN", second.mailbox()) == 1


def test_two_packages_with_the_same_type_are_refused_until_the_other_has_left(
    harness: QueueHarness,
) -> None:
    first = a_runner(harness, "first", make_manifest("resize", "send"))
    second = a_runner(harness, "second")
    with pytest.raises(
        wire.PackageConflict, match="shop/resize of other-jobs is also declared by shop-jobs"
    ):
        announce(harness, second, make_manifest("resize", package="other-jobs"))
    assert harness.client.execute("HGET", job_keys.runner(TAG, "second-1"), "manifests") is None
    # The same package may, and again.
    assert announce(harness, second, make_manifest("resize", version=2))
    assert announce(harness, second, make_manifest("resize", version=2))
    for queue in (first, second):
        queue.sign_off()
    third = a_runner(harness, "third", make_manifest("resize", package="other-jobs"))
    enqueue(harness, "1", "resize")
    assert claimed(third) == ["1"]
    with pytest.raises(wire.PackageConflict):
        announce(harness, third, make_manifest("a", package="x"), make_manifest("a", package="y"))


def test_each_type_counts_for_the_package_of_its_own_function(harness: QueueHarness) -> None:
    """Both packages import `common` first."""
    ours = make_manifest("notify", "resize", package="common", packages={"resize": "shop-a"})
    first = a_runner(harness, "first", ours)
    second = a_runner(harness, "second")
    with pytest.raises(
        wire.PackageConflict, match="shop/resize of shop-b is also declared by shop-a"
    ):
        announce(
            harness,
            second,
            make_manifest("notify", "resize", package="common", packages={"resize": "shop-b"}),
        )
    # Another package comes before the others: the types are those of the same packages as before.
    assert announce(
        harness,
        second,
        make_manifest(
            "count",
            "notify",
            "resize",
            package="analytics",
            packages={"notify": "common", "resize": "shop-a"},
        ),
    )
    first.sign_off()
    enqueue(harness, "1", "resize")
    assert claimed(second) == ["1"]


def test_a_runner_of_an_earlier_release_names_one_package_for_all_of_its_types(
    harness: QueueHarness,
) -> None:
    earlier = make_manifest("notify", "resize", package="common")
    a_runner(harness, "first", earlier)
    of_types = f"{job_keys.meta(TAG).removesuffix('meta')}packages:{wire.digest_of(earlier)}"
    assert harness.client.execute("DEL", of_types) == 1  # it writes no such key
    second = a_runner(harness, "second")
    with pytest.raises(wire.PackageConflict, match="shop/resize of shop-b is also declared by com"):
        announce(harness, second, make_manifest("resize", package="shop-b"))
    # The same code in this release: it says more of its types.
    packages = {"resize": "shop-a", "notify": "common"}
    newer = make_manifest("notify", "resize", package="common", packages=packages)
    assert announce(harness, second, newer)


def test_a_runner_that_is_not_registered_announces_nothing(harness: QueueHarness) -> None:
    queue = a_runner(harness, "first")
    queue.sign_off()
    assert not announce(harness, queue, make_manifest("resize"))
    assert not harness.client.execute("EXISTS", job_keys.manifests(TAG))


def test_old_manifests_go_and_those_of_live_runners_stay(harness: QueueHarness) -> None:
    first = a_runner(harness, "first", make_manifest("resize"))
    second = a_runner(harness, "second")
    for number in range(wire.MAX_MANIFESTS + 5):
        assert announce(harness, second, make_manifest("send", version=number + 1))
    digests = [name.decode() for name in harness.client.execute("HKEYS", job_keys.manifests(TAG))]
    assert wire.digest_of(make_manifest("resize")) in digests
    assert wire.digest_of(make_manifest("send")) not in digests
    assert len(digests) == wire.MAX_MANIFESTS + 1
    assert harness.client.execute("ZCARD", job_keys.announced(TAG)) == len(digests)
    for kind in ("types", "packages"):
        of_manifests = job_keys.meta(TAG).removesuffix("meta") + f"{kind}:*"
        assert len(harness.client.execute("KEYS", of_manifests)) == len(digests)
    enqueue(harness, "1", "resize")
    assert claimed(first) == ["1"]


def test_limits_and_counts_are_those_of_all_versions_of_a_type(harness: QueueHarness) -> None:
    queue = a_runner(harness, "first", make_manifest("resize"), make_manifest("resize", version=2))
    harness.client.execute("HSET", job_keys.meta(TAG), job_calls.limit_field("shop/resize"), "1")
    enqueue(harness, "old", "resize")
    enqueue(harness, "new", "resize", version=2)
    assert claimed(queue) == ["old"]
    assert claimed(queue) == []
    assert harness.client.execute("HVALS", job_keys.running(TAG, "shop/resize")) == [b"1"]


def test_a_manifest_counts_for_its_application_alone(harness: QueueHarness) -> None:
    a_runner(harness, "first", make_manifest("resize"))
    [entry] = harness.client.execute("HVALS", job_keys.manifests(TAG))
    assert wire.read_signed(entry, "shop", KEYS) == make_manifest("resize")
    bank = SECRETS.job_keys(job_keys.application_tag("bank"))
    for keys in (bank, SECRETS.job_keys(job_keys.FLEET_TAG)):
        with pytest.raises(InvalidSignature):
            wire.read_signed(entry, "shop", keys)
    with pytest.raises(MalformedMessage, match="declares types of bank, not of shop"):
        wire.publish("first-1", [make_manifest("resize", application="bank")], KEYS, "shop")
    with pytest.raises(
        MalformedMessage, match="bank/resize is no job type of the application shop"
    ):
        wire.publish(
            "first-1",
            [make_manifest("resize", application="bank").replace(b'"bank"', b'"shop"')],
            KEYS,
            "shop",
        )
