"""The scripts on a Valkey Cluster: all keys of one tag lie in one slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from infra.local.process import free_port
from infra.local.servers import ValkeyServer
from tests.support.jobs.queue import KEYS, QueueHarness, claim, die, end, ids
from tests.support.waiting import eventually
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol.messages import JobStatus


class ClusterNode(ValkeyServer):
    """A cluster of one node, which holds all slots and refuses keys of several slots in one
    script."""

    def command(self) -> Sequence[str]:
        # A port of its own for the bus: the usual one, 10,000 higher, does not exist for the
        # highest ports.
        return [*super().command(), "--cluster-enabled", "yes", "--cluster-port", str(free_port())]


@pytest.fixture
def cluster(short_directory: Path) -> Iterator[QueueHarness]:
    with ClusterNode(short_directory / "valkey", durable=False) as server:
        harness = QueueHarness(server.url)
        harness.client.execute("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        eventually(
            lambda: b"cluster_state:ok" in harness.client.execute("CLUSTER", "INFO"), "a cluster"
        )
        yield harness
        harness.close()


def test_every_script_runs_on_a_cluster(cluster: QueueHarness) -> None:
    first, second = cluster.runner("one"), cluster.runner("two")
    cluster.enqueue("a", unique="key", group="g", idempotent=True)
    cluster.enqueue("b", group="g", idempotent=True)
    cluster.enqueue("c", queue="other", delay=60)
    (job,) = claim(first)
    assert first.write_progress("a", job.fence, b"1")
    assert second.renew("idle", []).registered
    assert die(first, second) == {"a": "returned"}
    (job,) = claim(second)
    assert end(second, job, JobStatus.FAILED) == "failed"
    assert cluster.call(job_calls.requeue(["a"])) == ["a"]
    assert cluster.call(job_calls.cancel("c", KEYS)) == "cancelled"
    assert cluster.call(job_calls.suspend(queue="other")) == 1
    assert cluster.call(job_calls.configure({job_calls.limit_field("work"): "9"})) == 1
    second.return_ring()
    order = []
    while jobs := claim(second):
        order += ids(jobs)
        end(second, jobs[0], JobStatus.DONE)
    assert len(order) == 2
    assert sorted(order) == ["a", "b"]
    assert second.list_held() == []
    assert second.sign_off() == {}
