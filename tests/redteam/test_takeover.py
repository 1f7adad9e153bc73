"""Attacks on a whole running system, with a victim whose orders, views and answers must stay the
same.

Two attackers: one who only has Valkey, and one who took over a user's worker and has all that it
knows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from redis import Redis

from infra.vault.key_pairs import OrchestratorKeys
from infra.vault.message_secret import MessageSecretFile
from tests.support.systems.attacked import MADE_UP, AttackedSystem, StolenSecrets, read_owner
from tests.support.systems.local import until
from tests.support.systems.secrets import contains_secret
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.authentication import AssignmentKeys
from worker_runtime.protocol.messages import (
    AccountReported,
    ClaimReply,
    Failure,
    OrderEvent,
    OrderState,
    WorkerEvent,
    WorkerEventKind,
    encode,
)
from worker_runtime.protocol.worker_reports import VALID_UNTIL, sign_metadata

#: What an attacker has: nothing but Valkey, or a worker as well.
ATTACKERS = ("Valkey only", "hostile worker")


def keys_of(system: AttackedSystem, attacker: str) -> tuple[AssignmentKeys, StolenSecrets | None]:
    if attacker == "Valkey only":
        return MADE_UP, None
    _, stolen = system.hostile()
    return stolen.message_keys, stolen


def all_of_valkey(client: Redis) -> bytes:
    """All keys and values as they were written; a dump of the server's would be compressed."""
    written: list[Any] = []
    for key in client.scan_iter(count=1000):
        match client.type(key):
            case b"string":
                value: Any = client.get(key)
            case b"list":
                value = client.lrange(key, 0, -1)
            case b"hash":
                value = client.hgetall(key)
            case b"set":
                value = client.smembers(key)
            case b"zset":
                value = client.zrange(key, 0, -1)
            case b"stream":
                value = client.xrange(key)
            case b"none":  # it has expired
                continue
            case other:
                raise AssertionError(f"{key!r} is a {other!r}")
        written.append((key, value))
    return b"\n".join(flat(written))


def flat(value: Any) -> Iterator[bytes]:
    """The bytes in nested lists and mappings."""
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict):
        yield from flat(list(value.items()))
    elif value is not None:
        for inner in value:
            yield from flat(inner)


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_nobody_else_reports_a_users_orders(system: AttackedSystem, attacker: str) -> None:
    trader, order = system.victim()
    before = system.worker(trader)
    own, stolen = keys_of(system, attacker)
    forged_at_ms: set[int] = set()
    for number, user in enumerate({trader.user_id, stolen.user_id if stolen else "nobody"}):
        for state in (
            OrderState.FILLED,
            OrderState.CANCELLED,
            OrderState.REJECTED,
            OrderState.SUBMITTED,
        ):
            event = OrderEvent(
                event_id=f"{order['id']}:{state.value}{number}",
                order_id=order["id"],
                user_id=user,
                epoch=1,
                state=state,
                at_ms=time.time_ns() // 1_000_000,
                filled_quantity=order["quantity"] if state is OrderState.FILLED else 0,
                quantity=1,
            )
            forged_at_ms.add(event.at_ms)
            system.send_event(event, own)
    system.until_read()
    shown = system.shown(trader, order["id"])
    assert shown is not None
    # The user's own worker may report the state again, after a session that was slow.
    assert {**shown, "timeline": []} == {**order, "timeline": []}
    reported = {step["step"] for step in shown["timeline"]}
    assert reported == {step["step"] for step in order["timeline"]}
    times = {
        int(datetime.fromisoformat(step["at"]).timestamp() * 1000) for step in shown["timeline"]
    }
    assert not times & forged_at_ms
    assert system.worker(trader) == before
    assert system.order(trader).json()["state"] == "filled"
    assert len(system.ledger(trader)) == 2


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_nobody_else_reports_a_users_worker(system: AttackedSystem, attacker: str) -> None:
    """A workflow that heard of these would start another worker, or have its user parked."""
    trader, _ = system.victim()
    before, sessions = system.worker(trader), len(system.sessions(trader))
    worker_id, epoch = read_owner(system, trader)
    own, _ = keys_of(system, attacker)
    for sequence, kind in enumerate(WorkerEventKind, start=1000):
        event = WorkerEvent(
            worker_id=worker_id,
            user_id=trader.user_id,
            epoch=epoch,
            sequence=sequence,
            kind=kind,
            at_ms=time.time_ns() // 1_000_000,
        )
        system.send_event(event, own)
    system.until_read()
    assert system.worker(trader) == before
    assert len(system.sessions(trader)) == sessions
    assert system.order(trader).json()["state"] == "filled"


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_nobody_else_answers_a_claim(system: AttackedSystem, attacker: str) -> None:
    """Said in the middle of a slow login: that it was rejected, and that the worker is
    connected."""
    _, stolen = keys_of(system, attacker)
    token = stolen.config.launch_token if stolen else b"t" * 32
    trader = system.trader()
    system.slow_login(trader, 2.0)
    before = system.claims()
    started = system.begin(trader)
    claim_id, worker_id = system.next_claim(before)
    ended = threading.Event()
    forged = 0
    with system.valkey() as client:
        while not started.done() and not ended.wait(0.05):
            for failure in (Failure(code="LOGIN_REJECTED", detail="no"), None):
                reply = ClaimReply(
                    claim_id=claim_id, worker_id=worker_id, epoch=1, attempt=1, failure=failure
                )
                for data in (sealing.prove_reply(reply, token), encode(reply)):
                    client.rpush(
                        keys.pool_reply(system.stack.settings.pool, worker_id, claim_id), data
                    )
                    forged += 1
    answer = started.result(45)
    assert forged > 8
    assert answer.status_code == 200, answer.text
    assert answer.json()["worker_id"] == worker_id
    assert len(system.open_sessions(trader)) == 1


def test_a_worker_knows_nothing_of_another_user(system: AttackedSystem) -> None:
    """Neither the stolen of a worker nor all of Valkey has a key, a token or a secret of the
    victim."""
    trader = system.trader(api_key="canary-api-key", secret_key="canary-secret-key")
    system.start_until_active(trader)
    victims = system.order(trader)
    assert victims.json()["state"] == "filled"
    worker_id, epoch = read_owner(system, trader)
    settings = system.stack.settings
    message_keys = MessageSecretFile(settings.message_key_file).for_worker(trader.user_id, epoch)
    secrets = [
        b"canary-api-key",
        b"canary-secret-key",
        OrchestratorKeys(settings.orchestrator_key_dir).launch_token(worker_id),
        *(message_key.key for message_key in (*message_keys.request, *message_keys.assignment)),
    ]
    _, stolen = system.hostile()
    text = msgspec.json.encode(stolen)
    assert trader.user_id.encode() not in text
    assert [secret for secret in secrets if contains_secret(text, secret)] == []
    probe = "probe:of-this-search"
    with system.valkey() as client:
        everything = all_of_valkey(client)
        client.xadd(
            probe, {"e": msgspec.json.encode({"secrets": [b"x" + secret for secret in secrets]})}
        )
        with_probe = all_of_valkey(client)
        client.delete(probe)
    assert trader.user_id.encode() in everything
    assert [secret for secret in secrets if contains_secret(everything, secret)] == []
    assert all(contains_secret(with_probe, secret) for secret in secrets)


def test_what_is_deleted_is_delayed_and_never_done_twice(system: AttackedSystem) -> None:
    """Whoever has Valkey may take away all that it holds of a user. The orders are still submitted
    once."""
    trader, order = system.victim()
    names = [
        keys.mark,
        keys.metadata,
        keys.owner,
        keys.switch,
        keys.processing,
        keys.requests,
        keys.doorbell,
    ]
    stop = threading.Event()

    def delete() -> None:
        with system.valkey() as client:
            while not stop.wait(0.3):
                client.delete(*(name(trader.user_id) for name in names))

    thief = threading.Thread(target=delete)
    thief.start()
    client_order_id = uuid4().hex
    try:
        answers = [system.order(trader, client_order_id) for _ in range(2)]
    finally:
        stop.set()
        thief.join(10)
    assert {answer.status_code for answer in answers} <= {200, 201, 202, 409, 503}, answers[0].text
    notes = [entry.client_note for entry in system.ledger(trader)]
    assert len(notes) == len(set(notes))
    assert system.shown(trader, order["id"]) == order
    until(
        lambda: system.order(trader).json().get("state") == "filled",
        "an order that is filled again",
    )


def test_a_worker_cannot_become_another_users(system: AttackedSystem) -> None:
    """It writes its own entry anew, as free and the longest ready, with its own proven key."""
    _, stolen = system.hostile()
    config, key = stolen.config, X25519PrivateKey.from_private_bytes(stolen.private_key)
    public_key = key.public_key().public_bytes_raw()
    proof = sealing.prove_key(config.launch_token, config.worker_id, public_key)
    entry, inbox = (
        name(config.pool, config.worker_id) for name in (keys.pool_worker, keys.pool_inbox)
    )
    words = {
        "public_key": public_key,
        "proof": proof,
        "task": config.task_id,
        "version": config.version,
    }
    stop, taken = threading.Event(), []

    def come_back() -> None:
        with system.valkey() as client:
            while not stop.wait(0.02):
                client.hset(entry, mapping={**words, "state": "ready"})
                client.hdel(entry, "claim")
                client.zadd(keys.pool_ready(config.pool), {config.worker_id: 1})
                taken.extend(client.lrange(inbox, 0, -1))

    thief = threading.Thread(target=come_back)
    thief.start()
    try:
        for _ in range(2):
            trader = system.trader()
            system.start_until_active(trader)
            assert read_owner(system, trader)[0] != config.worker_id
            assert system.order(trader).json()["state"] == "filled"
    finally:
        stop.set()
        thief.join(10)
    assert taken == []


def test_absurd_messages_of_a_genuine_worker_stop_nobody(system: AttackedSystem) -> None:
    """Their author may sign them; they are given up, and the next user's events are recorded."""
    hostile, stolen = system.hostile()
    own = system.order(hostile).json()["id"]
    event = OrderEvent(
        event_id=f"{own}:x",
        order_id=own,
        user_id=hostile.user_id,
        epoch=stolen.epoch,
        state=OrderState.FILLED,
        at_ms=time.time_ns() // 1_000_000,
    )
    absurd: list[dict[str, Any]] = [
        {"at_ms": 10**18},
        {"at_ms": -(2**63)},
        {"average_price": Decimal("NaN"), "filled_quantity": 1},
        {"average_price": Decimal("1e400"), "filled_quantity": 2},
        {"filled_quantity": 2**62},
        {"quantity": -1, "price": Decimal("-Infinity")},
        {"reason": "\x00" * 1000},
        {"broker_order_id": "b" * 100_000},
        {"event_id": f"{own}:" + "x" * 10_000},
        {"order_id": "no order", "event_id": "no order:x"},
        {"epoch": 2**62},
    ]
    for number, changes in enumerate(absurd):
        fields: dict[str, Any] = msgspec.to_builtins(event)
        system.send_event({**fields, "event_id": f"{own}:{number}", **changes}, stolen.message_keys)
    reported = AccountReported(
        worker_id=stolen.config.worker_id,
        user_id=hostile.user_id,
        account_id="nobody's",
        epoch=stolen.epoch,
        at_ms=event.at_ms,
        report={"orders": "none", "taken_at_ms": 10**30},
    )
    system.send_event(reported, stolen.message_keys)
    system.until_read()
    system.victim()


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_a_forged_state_of_a_worker_is_shown_to_nobody(
    system: AttackedSystem, attacker: str
) -> None:
    trader, _ = system.victim()
    worker_id, epoch = read_owner(system, trader)
    own, _ = keys_of(system, attacker)
    fields = sign_metadata(
        {
            "worker": worker_id,
            "epoch": epoch,
            "state": "Draining",
            "health": "degraded: LOGIN_REJECTED",
            VALID_UNTIL: (time.time_ns() // 1_000_000) + 3_600_000,
        },
        trader.user_id,
        own.assignment,
    )
    seen: list[Any] = []
    with system.valkey() as client:
        for _ in range(40):  # over two renewals
            client.hset(keys.metadata(trader.user_id), mapping=dict(fields))
            seen.append(system.worker(trader)["metadata"]["state"])
            time.sleep(0.2)
    assert "Draining" not in seen
    until(lambda: system.worker(trader)["metadata"]["state"] == "Active", "the worker's own word")
    assert read_owner(system, trader) == (worker_id, epoch)
