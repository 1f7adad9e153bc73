"""What Temporal stores of a claim, an order and a rollout: nothing in clear, all for who has the
key."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio.client import Client, WorkflowHistory
from temporalio.worker import Replayer

from infra.exchange.behaviour import Behaviour, FaultPoint
from infra.local.servers import TemporalServer
from infra.local.stack import LocalStack
from infra.temporal.codec import ENCODING, data_converter
from infra.vault.secret_versions import load_versions
from tests.support.message_signing import age_versions
from tests.support.systems.local import VERIFY, RunningSystem, Trader, until
from workflows.order.workflow import OrderWorkflow
from workflows.rollout.workflow import RolloutWorkflow
from workflows.sandbox import workflow_runner
from workflows.user_worker.workflow import UserWorkerWorkflow
from workflows.worker_pool.workflow import WorkerPoolWorkflow

BERTH = str(Path(sys.executable).with_name("berth"))
REASON = "release-words-of-a-person"
#: Texts of failures that the server or the SDK writes itself; they tell nothing of a user.
SERVERS_OWN = {"Encoded failure", "Activity task timed out", "activity StartToClose timeout"}
#: What the SDK's core writes into the marker of a local activity, past any codec.
MARKERS_OWN = {
    "seq",
    "attempt",
    "activity_id",
    "activity_type",
    "complete_time",
    "backoff",
    "original_schedule_time",
    "activation_index",
}
pytestmark = pytest.mark.drill
WORKFLOWS = [OrderWorkflow, RolloutWorkflow, UserWorkerWorkflow, WorkerPoolWorkflow]


@pytest.fixture(scope="module")
def own_system() -> Iterator[RunningSystem]:
    """A system of its own: the others' pool stays on its version."""
    with tempfile.TemporaryDirectory(prefix="berth-histories-") as folder:
        Path(folder).chmod(0o755)
        with LocalStack(Path(folder), pool_target=2, connect_timeout=5.0, **VERIFY) as stack:
            system = RunningSystem(stack)
            yield system
            system.threads.shutdown()


@pytest.fixture(scope="module")
def traders(own_system: RunningSystem) -> list[Trader]:
    """Who claimed, ordered, was refused and was moved by a rollout; the key was rotated in
    between."""
    system = own_system
    filled, unknown, refused = system.trader(), system.trader(), system.trader(wrong_key=True)
    assert system.order(filled, "words-of-a-client").json()["state"] == "filled"
    assert system.order(refused).json()["code"] == "LOGIN_REJECTED"
    rotated = subprocess.run(
        [BERTH, "keys", "rotate", "temporal", "--data", str(system.stack.folder.path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "made key 2" in rotated.stdout
    age_versions(system.stack.folder.keys / "temporal.key", 60)  # from now on it encrypts
    lost = Behaviour(faults={FaultPoint.LOST_ACK: 1, FaultPoint.LOST_EVENT: 1})
    system.exchange(lambda admin: admin.set_behaviour(unknown.account_id, lost))
    order = system.order(unknown).json()

    def state() -> str:
        return str(system.call("GET", f"/v1/orders/{order['id']}", unknown.api_key).json()["state"])

    until(lambda: state() == "filled", "verified order")
    path, admin = "/v1/pools/default/rollout", system.stack.admin_key
    # Also while the market is open, where a worker is quiet after minutes by default.
    expected = {"version": "0.1.0-next", "reason": REASON, "quiet_seconds": 1}
    begun = system.call("POST", path, admin, json=expected)
    assert begun.is_success, begun.text
    until(
        lambda: system.call("GET", path, admin).json()["phase"] == "done", "finished rollout", 90.0
    )
    # A run that began under the first key continues under the second.
    assert system.order(filled).json()["state"] == "filled"
    return [filled, unknown, refused]


@pytest.fixture(scope="module")
def histories(own_system: RunningSystem, traders: list[Trader]) -> list[WorkflowHistory]:
    """All of them, as who has no key gets them."""

    async def fetched() -> list[WorkflowHistory]:
        client = await Client.connect(own_system.stack.temporal.address)
        executions = [execution async for execution in client.list_workflows()]
        made = [
            await client.get_workflow_handle(execution.id, run_id=execution.run_id).fetch_history()
            for execution in executions
        ]
        await asyncio.sleep(0.1)
        return made

    return asyncio.run(fetched())


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of a history as JSON, with where it stands."""
    if isinstance(value, dict):
        yield path, value
        for name, part in value.items():
            yield from _walk(part, f"{path}.{name}")
    elif isinstance(value, list):
        for part in value:
            yield from _walk(part, path)


@pytest.mark.timeout(300)
def test_nothing_is_in_clear(
    own_system: RunningSystem, traders: list[Trader], histories: list[WorkflowHistory]
) -> None:
    keys, clear, failures = set(), set(), set()
    everything = b""
    for history in histories:
        shown = history.to_json_dict()
        everything += json.dumps(shown).encode()
        for path, part in _walk(shown):
            if "encoding" in part.get("metadata", {}) and ".searchAttributes" not in path:
                encoding, data = (
                    base64.b64decode(encoded)
                    for encoded in (part["metadata"]["encoding"], part.get("data", ""))
                )
                everything += data
                if encoding == ENCODING:
                    keys.add(base64.b64decode(part["metadata"]["encryption-key-id"]))
                elif data and not (
                    (
                        path.endswith(".details.data.payloads")
                        and set(json.loads(data)) <= MARKERS_OWN
                    )
                    # The name of a patch, which is a constant of the code.
                    or path.endswith(".details.patch-data.payloads")
                ):
                    clear.add((path, encoding, data[:80]))
            if path.lower().endswith(("failure", "cause")):
                failures.add(part.get("message", ""))
                assert not part.get("stackTrace")
    for kind in ("user-worker-", "worker-pool-", "order-", "rollout-"):
        assert any(history.workflow_id.startswith(kind) for history in histories), kind
    assert keys == {b"1", b"2"}
    assert clear == set()
    assert "Encoded failure" in failures
    assert failures <= SERVERS_OWN, failures
    secret = ["words-of-a-client", REASON, *(trader.account_id for trader in traders)]
    assert [word for word in secret if word.encode() in everything] == []
    # User ids are in ids of workflows and in search attributes, on purpose: operators find users by
    # them.
    assert traders[0].user_id.encode() in everything


@pytest.mark.timeout(300)
def test_a_replay_needs_the_key_and_the_namespace(
    own_system: RunningSystem, histories: list[WorkflowHistory]
) -> None:
    kinds = ("user-worker-", "order-", "worker-pool-", "rollout-")
    ours = [history for history in histories if history.workflow_id.startswith(kinds)]
    assert ours

    async def replayed() -> list[str]:
        replayer = Replayer(
            workflows=WORKFLOWS,
            namespace=own_system.stack.settings.temporal_namespace,
            workflow_runner=workflow_runner(),
            data_converter=data_converter(own_system.stack.settings),
            debug_mode=True,
        )
        results = [
            await replayer.replay_workflow(history, raise_on_replay_failure=False)
            for history in ours
        ]
        return [str(result.replay_failure) for result in results if result.replay_failure]

    assert asyncio.run(replayed()) == []


@pytest.mark.timeout(300)
def test_the_codec_server_shows_histories_to_anyone_who_has_its_address(
    own_system: RunningSystem, traders: list[Trader]
) -> None:
    origin = own_system.stack.ui_url
    encoding = base64.b64encode(ENCODING).decode()
    summary = base64.b64encode(f'"worker of user {traders[0].user_id}"'.encode()).decode()
    encrypted = _show(own_system, traders[0])
    assert (encoding in encrypted, summary in encrypted) == (True, False)
    with own_system.codec_endpoint() as endpoint, httpx.Client(trust_env=False) as http:
        shown = _show(own_system, traders[0], "--codec-endpoint", endpoint)
        assert (encoding in shown, summary in shown) == (False, True)
        # The command hands even an empty input to the codec.
        query = ("--type", "view", "--codec-endpoint", endpoint)
        assert traders[0].user_id in _temporal(own_system, "query", traders[0], *query)
        payload = {"payloads": [{"metadata": {"encoding": encoding}, "data": "AAAA"}]}
        stranger = endpoint.rpartition("/")[0] + "/" + "0" * 32
        assert http.post(f"{stranger}/decode", json=payload).status_code == 404
        assert http.post(f"{stranger}/encode", json=payload).status_code == 404
        assert http.post(f"{endpoint}/encode", json=payload).json() == payload
        assert http.post(f"{endpoint}/decode", json={"payloads": 1}).status_code == 400
        assert http.post(f"{endpoint}/decode", json=payload).json() == payload, "shown as it is"
        clear = {"metadata": {"encoding": base64.b64encode(b"json/plain").decode()}, "data": "MQ=="}
        made = http.post(f"{endpoint}/order-1/encode", json={"payloads": [clear]}).json()
        assert base64.b64decode(made["payloads"][0]["metadata"]["workflow-id"]) == b"order-1"
        assert http.post(f"{endpoint}/order-1/decode", json=made).json() == {"payloads": [clear]}
        for page, allowed in ((origin, origin), ("http://evil.test", None)):
            asked = {"Origin": page, "Access-Control-Request-Method": "POST"}
            answer = http.options(f"{endpoint}/decode", headers=asked)
            assert answer.headers.get("access-control-allow-origin") == allowed


def _show(system: RunningSystem, trader: Trader, *options: str) -> str:
    """A user's history as the `temporal` command shows it."""
    return _temporal(system, "show", trader, *options)


def _temporal(system: RunningSystem, act: str, trader: Trader, *options: str) -> str:
    """What `temporal workflow ACT` prints about the worker of a user."""
    done = subprocess.run(
        [
            TemporalServer.binary(),
            "workflow",
            act,
            "--address",
            system.stack.temporal.address,
            "--workflow-id",
            f"user-worker-{trader.user_id}",
            "--output",
            "json",
            *options,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_old_keys_go_only_on_purpose(own_system: RunningSystem, traders: list[Trader]) -> None:
    path = own_system.stack.folder.keys / "temporal.key"
    rotate = [BERTH, "keys", "rotate", "temporal", "--data", str(own_system.stack.folder.path)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert (
        subprocess.run([*rotate, "--keep", "1"], capture_output=True, check=False).returncode == 2
    )
    assert [version.version for version in load_versions(path)] == [2, 1]
    for _ in range(2):
        subprocess.run(rotate, capture_output=True, check=True)
        assert own_system.order(traders[0]).json()["state"] == "filled"
    assert [version.version for version in load_versions(path)] == [4, 3, 2, 1]
