"""Workers under user ids of their own: one of them reads nothing of another, of the node, or of its
host."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from infra import processes
from infra.launchers.process import ProcessLauncher
from infra.local.servers import ValkeyServer
from infra.node.__main__ import NODE_UIDS
from infra.node.accounts import UserIds
from infra.settings import Settings
from infra.worker_task import LaunchFailed, LaunchSpec, Task
from tests.support.interpreters import opened_interpreter
from tests.support.launchers.node_process import PATIENCE, NodeProcess
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import WorkerConfig

WORKER = shlex.join([sys.executable, "-P", "-m", "worker_runtime"])
#: Three ids that no other process of this run has.
FIRST = 61_000 + 3 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
LAST = FIRST + 2

needs_root = pytest.mark.needs("root")

_ATTACK = """
import json, os, socket, sys
asked = json.load(sys.stdin)
os.setgroups([]); os.setgid(asked["user"]); os.setuid(asked["user"])
got = []

def attempt(name, action):
    try:
        action()
    except OSError:
        return
    got.append(name)

for path in asked["files"]:
    attempt(path, lambda: open(path, "rb").read(1))
for path in asked["folders"]:
    attempt(path, lambda: os.listdir(path))
for pid in asked["pids"]:
    attempt(f"signal {pid}", lambda: os.kill(pid, 0))
attempt("node", lambda: socket.socket(socket.AF_UNIX).connect(asked["node"]))
print(json.dumps(got))
"""


@pytest.fixture
async def node(short_directory: Path) -> AsyncIterator[NodeProcess]:
    os.chmod(short_directory, 0o711)  # noqa: S103 - workers pass through it
    node = NodeProcess(
        short_directory, WORKER, before=opened_interpreter(short_directory), uids=f"{FIRST}-{LAST}"
    )
    await node.start()
    yield node
    await node.close()


async def launch(node: NodeProcess, valkey: ValkeyServer, client: Redis, worker_id: str) -> Task:
    """A real worker, once it is ready."""
    config = WorkerConfig(
        worker_id=worker_id,
        pool="default",
        valkey_url=valkey.url,
        launch_token=b"t" * 32,
        orchestrator_keys=(bytes(range(32)),),
    )
    task = await ProcessLauncher(node.socket).launch(
        LaunchSpec(config=config), f"token-{worker_id}"
    )
    deadline = time.monotonic() + PATIENCE
    while not await client.exists(keys.pool_worker("default", worker_id)):
        assert time.monotonic() < deadline, node.output_of(worker_id) + node.log.read_text()
        await asyncio.sleep(0.02)
    return task


def user_of(pid: int) -> int:
    """The user id of a process; every id that it has is the same."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    facts = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    [user] = {int(word) for name in ("Uid", "Gid") for word in facts[name].split()}
    assert facts["Groups"].strip() == ""
    assert facts["NoNewPrivs"] == "1"
    return user


def user_of_all(pids: list[int]) -> int:
    [user] = {user_of(pid) for pid in pids}
    return user


def attack(user: int, **asked: Any) -> list[str]:
    """What a program under this user id gets of what it is asked to try."""
    done = subprocess.run(
        [sys.executable, "-c", _ATTACK],
        input=json.dumps({"user": user, **asked}),
        capture_output=True,
        text=True,
        check=True,
    )
    got: list[str] = json.loads(done.stdout)
    return got


@needs_root
async def test_a_worker_reads_nothing_of_another_and_ends_no_process(
    node: NodeProcess, valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    tasks = [await launch(node, valkey_server, valkey_client, f"w-{number}") for number in range(2)]
    families = [processes.live_members(node.pid_of(task.task_id)) for task in tasks]
    mine, other = (user_of_all(family) for family in families)
    assert mine != other
    assert FIRST <= mine <= LAST
    assert node.process is not None
    pids = [*families[1], node.process.pid]
    state = [
        path
        for path in node.state.rglob("*")
        if node.state / "run" / tasks[0].task_id not in path.parents
    ]
    got = attack(
        mine,
        files=[str(path) for path in state if path.is_file()]
        + [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "mem", "maps", "auxv")],
        folders=[str(path) for path in state if path.is_dir() and path.name != tasks[0].task_id]
        + [f"/proc/{pid}/{name}" for pid in pids for name in ("fd", "map_files")],
        pids=pids,
        node=str(node.socket),
    )
    assert got == []


@needs_root
async def test_a_restarted_node_continues_with_free_user_ids(
    node: NodeProcess, valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    first = await launch(node, valkey_server, valkey_client, "w-1")
    # Nothing that a worker could leave there stops the node's trial.
    trial = node.state / "run" / "trial"
    trial.mkdir(exist_ok=True)
    (trial / "left").touch()
    await node.restart(signal.SIGKILL)
    tasks = [
        first,
        *[await launch(node, valkey_server, valkey_client, f"w-{number}") for number in (2, 3)],
    ]
    assert {user_of(node.pid_of(task.task_id)) for task in tasks} == set(range(FIRST, LAST + 1))
    with pytest.raises(LaunchFailed, match="BERTH_NODE_UIDS"):
        await launch(node, valkey_server, valkey_client, "w-4")
    launcher = ProcessLauncher(node.socket)
    await launcher.stop(first.task_id, "test")
    assert not (node.state / "run" / first.task_id).exists()
    await launch(node, valkey_server, valkey_client, "w-5")


@needs_root
async def test_a_user_id_that_cannot_run_workers_is_not_used_and_the_log_says_so(
    short_directory: Path,
) -> None:
    os.chmod(short_directory, 0o700)  # nobody reaches the workers' folders
    node = NodeProcess(short_directory, uids=f"{FIRST}-{LAST}")
    await node.start()
    try:
        deadline = time.monotonic() + 10
        while "node.workers_share_user" not in (log := node.log.read_text()):
            assert time.monotonic() < deadline, log  # a thread of its own writes the log
            await asyncio.sleep(0.02)
        [line] = [line for line in log.splitlines() if "node.workers_share_user" in line]
        assert "cannot run a worker" in line
    finally:
        await node.close()


def test_user_ids_are_taken_in_turn() -> None:
    ids = UserIds(FIRST, LAST)
    assert [ids.take() for _ in range(4)] == [FIRST, FIRST + 1, LAST, FIRST]


def test_node_and_settings_have_one_default() -> None:
    assert Settings.model_fields["node_uids"].default == NODE_UIDS
