"""Contains a whole system with attackers: one who only has Valkey, one who took over a worker."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from activities.events.stream import GROUPS
from infra.local.stack import LocalStack
from tests.support.systems.local import RunningSystem, Trader, until
from worker_runtime.protocol import keys
from worker_runtime.protocol.authentication import AssignmentKeys, MessageKey, sign
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import Credentials, Event
from worker_runtime.protocol.worker_reports import EVENT

POOL = 4

#: Whether workers have Valkey users. The attackers of these tests have the password of the server,
#: which is what a worker has without a user of its own.
VALKEY_USERS = os.environ.get("BERTH_VALKEY_USERS", "true") == "true"


class StolenSecrets(msgspec.Struct, frozen=True, kw_only=True):
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


class AttackedSystem(RunningSystem):
    """A running system, of which users can be made hostile."""

    def __init__(self, stack: LocalStack, hook: Path) -> None:
        super().__init__(stack)
        self._hook = hook

    def hostile(self) -> tuple[Trader, StolenSecrets]:
        """A new user whose broker SDK gives away its worker, which is Active."""
        return self.take_over(self.trader())

    def take_over(self, trader: Trader) -> tuple[Trader, StolenSecrets]:
        """Starts the worker of a user, with a broker SDK that gives it away."""
        (self._hook / "hostile").write_text(trader.user_id, encoding="utf-8")
        self.start_until_active(trader)
        until((self._hook / f"{trader.user_id}.stolen").exists, "stolen")
        return trader, self.stolen_by(trader)

    def stolen_by(self, trader: Trader) -> StolenSecrets:
        """What the broker SDK of a hostile user's latest worker gave away."""
        return msgspec.json.decode(
            (self._hook / f"{trader.user_id}.stolen").read_bytes(), type=StolenSecrets
        )

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


def read_owner(system: AttackedSystem, trader: Trader) -> tuple[str, int]:
    with system.valkey() as client:
        owner: dict[bytes, bytes] = client.hgetall(keys.owner(trader.user_id))
    return owner[b"worker"].decode(), int(owner[b"epoch"])
