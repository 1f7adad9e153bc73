"""The whole system with attackers in it: one who only has Valkey, and one who took over a user's
worker."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from activities.events.stream import GROUPS
from infra.local.stack import LocalStack
from tests.e2e.conftest import House, Trader, until
from tests.integration.activities.conftest import yard
from tests.integration.api.conftest import api, settings, start_worker
from tests.integration.jobs.conftest import fleet, stage
from worker_runtime.protocol.authentication import AssignmentKeys, MessageKey, sign
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import Credentials, Event
from worker_runtime.protocol.worker_reports import EVENT

__all__ = ["api", "fleet", "settings", "stage", "start_worker", "yard"]

POOL = 4
#: Whether workers have Valkey users. The attackers of these tests have the password of the server,
#: which is what a worker has without a user of its own.
VALKEY_USERS = os.environ.get("BERTH_VALKEY_USERS", "true") == "true"


class Loot(msgspec.Struct, frozen=True, kw_only=True):
    """What the code of a broker SDK finds in its session process."""

    config: WorkerConfig
    user_id: str
    epoch: int
    claim_id: str
    message_keys: AssignmentKeys
    private_key: bytes
    credentials: Credentials
    #: Names of all budgets under which its calls are counted.
    budgets: list[str] = []


#: Keys of somebody who only has Valkey: made up.
MADE_UP = AssignmentKeys(
    request=(MessageKey(1, b"r" * 32),),
    assignment=(MessageKey(1, b"a" * 32),),
)


class Arena(House):
    """A running system, of which users can be made hostile."""

    def __init__(self, stack: LocalStack, hook: Path) -> None:
        super().__init__(stack)
        self._hook = hook

    def hostile(self) -> tuple[Trader, Loot]:
        """A new user whose broker SDK gives away its worker, which is Active."""
        return self.take_over(self.trader())

    def take_over(self, trader: Trader) -> tuple[Trader, Loot]:
        """Starts the worker of a user, with a broker SDK that gives it away."""
        (self._hook / "hostile").write_text(trader.user_id, encoding="utf-8")
        self.start_until_active(trader)
        until((self._hook / f"{trader.user_id}.loot").exists, "loot")
        return trader, self.loot_of(trader)

    def loot_of(self, trader: Trader) -> Loot:
        """What the broker SDK of a hostile user's latest worker gave away."""
        return msgspec.json.decode((self._hook / f"{trader.user_id}.loot").read_bytes(), type=Loot)

    def victim(self) -> tuple[Trader, dict[str, Any]]:
        """A new user with an Active worker and an order that rests at the broker."""
        trader = self.trader()
        self.start_until_active(trader)
        placed = self.order(trader, price_type="LMT", price="10.00", time_in_force="ROD")
        assert placed.json()["state"] == "submitted", placed.text
        order: dict[str, Any] = until(
            lambda: self.shown(trader, placed.json()["id"]), "a recorded order"
        )
        return trader, order

    def shown(self, trader: Trader, order_id: str) -> dict[str, Any] | None:
        """The order as the API shows it, once the recorder has its submission."""
        view: dict[str, Any] = self.call("GET", f"/v1/orders/{order_id}", trader.api_key).json()
        return view if "submitted" in [step["step"] for step in view["timeline"]] else None

    def worker(self, trader: Trader) -> dict[str, Any]:
        """The user's worker as the API shows it, but for what changes by itself."""
        view: dict[str, Any] = self.call(
            "GET", f"/v1/users/{trader.user_id}/worker", trader.api_key
        ).json()
        shown = {
            name: view["metadata"].get(name) for name in ("worker", "epoch", "state", "health")
        }
        return {**{name: view[name] for name in ("live", "state", "mark")}, "metadata": shown}

    def send_event(self, event: Event | dict[str, Any], keys: AssignmentKeys) -> None:
        """Adds an event to the stream, signed with these keys; as a dictionary it may be absurd."""
        payload = msgspec.json.encode(event)
        mac = sign(keys.assignment, b"event/1", payload)
        with self.valkey() as client:
            for stream in GROUPS.values():
                client.xadd(stream, {EVENT: f"{mac} ".encode() + payload})

    def until_read(self) -> None:
        """Waits until the orchestrator has read all events, and done what it does about them."""
        with self.valkey() as client:
            until(
                lambda: all(
                    group["pending"] == 0 and not group["lag"]
                    for stream in GROUPS.values()
                    for group in client.xinfo_groups(stream)
                ),
                "read events",
            )
        time.sleep(1.0)  # workflows act on their signals


@pytest.fixture(scope="package")
def running_arena() -> Iterator[Arena]:
    folder = Path(tempfile.mkdtemp(prefix="berth-redteam-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user than root
    hook = folder / "hook"
    shutil.copytree(Path(__file__).parent / "hook", hook)
    (hook / "hostile").write_text("", encoding="utf-8")
    hook.chmod(0o777)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(hook))
            patch.setenv("BERTH_LOCAL_PASS_ENVIRONMENT", '["PYTHONPATH"]')
            with LocalStack(
                folder / "stack",
                pool_target=POOL,
                connect_timeout=5.0,
                valkey_users=VALKEY_USERS,
                egress_address="192.0.2.1",
                egress_persons=1000,
            ) as stack:
                arena = Arena(stack, hook)
                yield arena
                arena.threads.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def arena(running_arena: Arena) -> Arena:
    """The running system with a full pool."""
    running_arena.stack.wait_pool(POOL)
    return running_arena


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test with the whole system pays for its start."""
    for item in items:
        if "arena" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(150))
