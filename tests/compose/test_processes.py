"""The profile `processes`, on the data that the other profile left: the node, its limits, and its
stops."""

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from infra.worker_task import MEMORY_HARD_BYTES
from tests.support.systems.compose import PATIENCE, ComposeProject, Customer
from tests.support.systems.local import until
from worker_runtime.process.cgroup import MemoryGroup

pytestmark = [pytest.mark.drill, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def group(stack: ComposeProject, alice: Customer) -> Iterator[Path]:
    """The stack runs with a node, whose cgroup this is; an order was placed before the change."""
    said = stack.run("sh", "infra/compose/node-cgroup.sh", f"berth-test-{os.getpid()}")
    folder = Path(said.strip().rpartition("BERTH_NODE_CGROUP=")[2])
    # The launcher of the profile before holds the socket until it is gone.
    stack.compose("down", "--timeout", "20")
    stack.profile = "processes"
    stack.environment["BERTH_NODE_CGROUP"] = str(folder)
    try:
        stack.up()
        yield folder
    finally:
        stack.compose("down", "--volumes", "--timeout", "20")
        for path in sorted(folder.rglob("*/"), reverse=True):
            path.rmdir()
        folder.rmdir()


def test_the_data_is_there_and_a_repeated_order_is_answered(
    stack: ComposeProject, alice: Customer, group: Path
) -> None:
    once = uuid4().hex
    first = until(
        lambda: placed if (placed := stack.order(alice, once)).status_code == 201 else None,
        "fill",
        PATIENCE,
    )
    again = stack.order(alice, once)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    orders = stack.call(
        "GET", f"/v1/users/{alice.user_id}/orders", alice.api_key, params={"limit": 100}
    ).json()
    assert len(orders["orders"]) > 2  # those of the other profile are there


def limited(stack: ComposeProject, group: Path) -> list[MemoryGroup]:
    files = [*group.glob("*/task-*/memory.limit_in_bytes"), *group.glob("*/task-*/memory.max")]
    assert {int(path.read_text()) for path in files} == {MEMORY_HARD_BYTES}
    return [MemoryGroup(path.parent) for path in files]


def test_each_worker_has_its_limit(stack: ComposeProject, alice: Customer, group: Path) -> None:
    groups = until(lambda: limited(stack, group), "workers", PATIENCE)
    assert all(group.members() for group in groups)


@pytest.mark.parametrize("how", ["stop and start", "docker stop past compose", "killed"])
def test_the_node_goes_and_comes_back(
    stack: ComposeProject, alice: Customer, group: Path, how: str
) -> None:
    before = stack.worker(alice)
    if how == "killed":
        stack.kill("node")
    else:
        container = stack.compose("ps", "--quiet", "node").strip()
        stack.run(
            *(
                ["docker", "stop", container]
                if "docker" in how
                else ["docker", "compose", "stop", "node"]
            )
        )
        ended = stack.compose("logs", "--no-log-prefix", "--tail", "30", "node")
        assert '"workers_left":0' in ended
        assert '"forced"' not in ended
        stack.compose("start", "node")
    until(lambda: stack.filled(alice), "filled order", PATIENCE)
    after = stack.worker(alice)
    assert after["mark"]["epoch"] > before["mark"]["epoch"]
    # Nor does a worker crash with its node: nobody saw how it ended.
    assert after["lifecycle"]["crashes"] == before["lifecycle"]["crashes"]


def test_without_its_cgroup_the_node_does_not_start_and_says_why(
    stack: ComposeProject, group: Path, tmp_path: Path
) -> None:
    stack.compose("stop", "node")
    tmp_path.chmod(0o777)
    said = stack.compose(
        "run", "--rm", "--no-deps", "node", check=False, BERTH_NODE_CGROUP=str(tmp_path)
    )
    assert "LIMITS_UNAVAILABLE" in said
    assert "/cgroup" in said
