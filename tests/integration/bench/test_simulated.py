"""A simulated node behind the real launcher: what the orchestrator does to workers works on these,
too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from activities.pool import entries
from infra.lab.bench.fleet.simulated.calls import SimulatedConnections
from infra.lab.bench.fleet.simulated.supervisor import SimulatedSupervisor
from infra.lab.bench.fleet.simulated.worker import SimulatedBehaviour
from infra.launchers.process import ProcessLauncher
from infra.local.servers import ValkeyServer
from infra.node.address import listen
from infra.node.server import NodeServer
from infra.valkey import client as valkey
from infra.worker_task import LaunchFailed, LaunchSpec
from tests.support.message_signing import (
    SECRETS,
    raw_enqueue_args,
    read_workers_answer,
    switch_words,
)
from worker_runtime.protocol import keys, scripts, sealing
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import (
    Claim,
    ClaimReply,
    Message,
    ReleaseClaim,
    Shutdown,
    WorkerEvent,
)
from worker_runtime.protocol.worker_reports import read_event

SECRET = b"s" * 32
KEY = Ed25519PrivateKey.generate()
USER, POOL, CLAIM_ID = "u1", "simulated", "c1"


class SimulatedHarness:
    """A small orchestrator: it launches through the node's socket and claims through Valkey."""

    def __init__(self, client: Any, launcher: ProcessLauncher, url: str) -> None:
        self.client = client
        self.launcher = launcher
        self.url = url

    def config(self, worker_id: str, **changes: Any) -> WorkerConfig:
        return WorkerConfig(
            **{
                "worker_id": worker_id,
                "pool": POOL,
                "valkey_url": self.url,
                "launch_token": sealing.launch_token(SECRET, worker_id),
                "orchestrator_keys": (KEY.public_key().public_bytes_raw(),),
                "mark_period": 0.2,
                "mark_ttl": 10.0,
                **changes,
            }
        )

    async def launch(self, worker_id: str, token: str = "", **changes: Any) -> str:
        spec = LaunchSpec(config=self.config(worker_id, **changes))
        return (await self.launcher.launch(spec, token or f"token-{worker_id}")).task_id

    async def take(self, claim_id: str = CLAIM_ID) -> list[bytes]:
        """What `claim.lua` says once a worker is ready."""
        while True:
            for ring in await self.client.lrange(keys.EVENT_BELL, 0, -1):
                if b" " in ring:
                    await entries.admit(self.client, POOL, ring.split()[1].decode(), "")
            reply: list[bytes] = await valkey.run_script(
                self.client,
                scripts.CLAIM,
                [keys.pool_ready(POOL), keys.pool_claim(POOL, claim_id)],
                [claim_id, keys.pool_worker_prefix(POOL), keys.CLAIM_TTL_S],
            )
            if reply[0] != b"empty":
                return reply
            await asyncio.sleep(0.01)

    async def push(self, worker_id: str, message: Message) -> None:
        await self.client.rpush(keys.pool_inbox(POOL, worker_id), sealing.sign(message, KEY))

    async def active(self, worker_id: str, epoch: int = 1) -> ClaimReply:
        """Claims the worker for the user; its reply."""
        await self.launch(worker_id)
        _, claimed, public_key, *_ = await self.take()
        assert claimed.decode() == worker_id
        assert await self.own(worker_id, epoch) == b"ok"
        claim = Claim(
            claim_id=CLAIM_ID,
            worker_id=worker_id,
            user_id=USER,
            epoch=epoch,
            generation="g1",
            connect_timeout=5.0,
            accounts=[],
            sealed_keys=sealing.seal_message_keys(
                SECRETS.for_worker(USER, epoch),
                public_key,
                user_id=USER,
                epoch=epoch,
                claim_id=CLAIM_ID,
                worker_id=worker_id,
            ),
        )
        await self.push(worker_id, claim)
        _, data = await self.client.blpop([keys.pool_reply(POOL, worker_id, CLAIM_ID)], 10)
        return sealing.open_reply(data, sealing.launch_token(SECRET, worker_id))

    async def own(self, worker_id: str, epoch: int) -> bytes:
        owned: bytes = await valkey.run_script(
            self.client,
            scripts.SET_OWNER,
            [keys.owner(USER), keys.switch(USER)],
            [epoch, worker_id, "g1", *switch_words(USER)],
        )
        return owned

    async def ended(self) -> tuple[str, int | None, str]:
        """Worker, exit code and reason of the next end."""
        async with asyncio.timeout(10):
            async for end in self.launcher.exits():
                return end.worker_id, end.exit_code, end.reason
        raise AssertionError("the stream of ends was closed")

    async def reported(self) -> list[str]:
        told = [
            entry
            for name in await self.client.keys(keys.events_of("*"))
            for entry in await self.client.lrange(name, 0, -1)
        ]
        events = [read_event(entry, SECRETS.assignment_keys) for entry in told]
        return [event.kind.value for event in events if isinstance(event, WorkerEvent)]


@asynccontextmanager
async def _harness(
    server: ValkeyServer, folder: Path, habits: SimulatedBehaviour
) -> AsyncIterator[SimulatedHarness]:
    link = SimulatedConnections(server.url)
    supervisor = SimulatedSupervisor(link, habits)
    node = NodeServer(supervisor, supervisor, limits="none")
    socket = folder / "node.sock"
    await node.start(listen(socket))
    client: Any = valkey.connect_valkey(server.url, socket_timeout=15.0)
    await client.flushall()
    launcher = ProcessLauncher(socket)
    try:
        yield SimulatedHarness(client, launcher, server.url)
    finally:
        await launcher.close()
        await client.aclose()
        await node.close()
        await supervisor.close()
        await link.close()


@pytest.fixture
async def harness(
    valkey_server: ValkeyServer, short_directory: Path
) -> AsyncIterator[SimulatedHarness]:
    async with _harness(
        valkey_server, short_directory, SimulatedBehaviour(start=0.0, connect=0.0)
    ) as made:
        yield made


async def test_a_launched_worker_is_ready_with_a_key_that_it_proves(
    harness: SimulatedHarness,
) -> None:
    await harness.launch("w1")
    status, worker_id, public_key, proof = await harness.take()
    assert (status, worker_id) == (b"claimed", b"w1")
    assert sealing.check_key(sealing.launch_token(SECRET, "w1"), "w1", public_key, proof)


async def test_the_same_token_is_the_same_worker_and_another_one_is_refused(
    harness: SimulatedHarness,
) -> None:
    first = await harness.launch("w1")
    assert await harness.launch("w1") == first
    with pytest.raises(LaunchFailed, match="runs already"):
        await harness.launch("w1", token="another")
    assert len(await harness.launcher.list()) == 1


async def test_a_claimed_worker_connects_shows_its_mark_and_tells(
    harness: SimulatedHarness,
) -> None:
    reply = await harness.active("w1", epoch=3)
    assert (reply.failure, reply.epoch, reply.worker_id) == (None, 3, "w1")
    assert await harness.client.get(keys.mark(USER)) == b"3:w1"
    metadata = await harness.client.hgetall(keys.metadata(USER))
    assert (metadata[b"state"], metadata[b"epoch"]) == (b"Active", b"3")
    assert await harness.reported() == ["connected"]


async def test_the_mark_is_renewed_until_a_later_epoch_owns_the_user(
    harness: SimulatedHarness,
) -> None:
    await harness.active("w1")
    await harness.client.pexpire(keys.mark(USER), 3000)
    lives = 0
    while lives <= 3000:  # only a renewal can set it back to the whole 10 s
        await asyncio.sleep(0.02)
        lives = await harness.client.pttl(keys.mark(USER))
    await harness.own("w2", 2)
    assert await harness.ended() == ("w1", 66, "exited")


async def test_a_shutdown_ends_it_gracefully_and_takes_its_mark_away(
    harness: SimulatedHarness,
) -> None:
    await harness.active("w1")
    signed = sealing.sign(Shutdown(user_id=USER, epoch=1, reason="idle"), KEY)
    await valkey.run_script(
        harness.client, scripts.SEND_CONTROL, [keys.control(USER), keys.doorbell(USER)], [signed]
    )
    assert await harness.ended() == ("w1", 0, "exited")
    assert not await harness.client.exists(keys.mark(USER), keys.metadata(USER))
    assert await harness.reported() == ["connected", "closed"]


async def test_a_claim_that_was_released_first_ends_it_unconnected(
    harness: SimulatedHarness,
) -> None:
    await harness.launch("w1")
    await harness.take()
    entry = keys.pool_worker(POOL, "w1")
    assert (
        await valkey.run_script(
            harness.client, scripts.SETTLE_CLAIM, [entry], [CLAIM_ID, "released"]
        )
        == b"released"
    )
    await harness.push("w1", ReleaseClaim(claim_id=CLAIM_ID, worker_id="w1", reason="too late"))
    worker_id, code, _ = await harness.ended()
    assert worker_id == "w1"
    assert code in (0, 67)  # by the message, or by the renewal that noticed it
    assert not await harness.client.exists(keys.mark(USER))


async def test_a_stop_is_answered_when_it_has_ended_and_nothing_of_it_is_left(
    harness: SimulatedHarness,
) -> None:
    task_id = await harness.launch("w1")
    await harness.take("other")
    await harness.launcher.stop(task_id, "the pool shrinks")
    assert await harness.launcher.list() == []
    assert await harness.ended() == ("w1", 0, "stopped")
    assert not await harness.client.exists(keys.pool_worker(POOL, "w1"))


async def test_the_users_of_busy_workers_show_activity_again_and_again(
    valkey_server: ValkeyServer, short_directory: Path
) -> None:
    habits = SimulatedBehaviour(start=0.0, connect=0.0, used=True)
    async with _harness(valkey_server, short_directory, habits) as harness:
        await harness.active("w1")
        seen = {await harness.client.hget(keys.metadata(USER), "last_activity_ms")}
        while len(seen) < 3:
            await asyncio.sleep(0.02)
            seen.add(await harness.client.hget(keys.metadata(USER), "last_activity_ms"))
        assert sorted(seen)[0] > b"0"


async def test_an_order_is_answered_with_a_refusal_so_that_nobody_waits(
    harness: SimulatedHarness,
) -> None:
    await harness.active("w1")
    names = [keys.seen(USER, "r1"), keys.requests(USER), keys.doorbell(USER), keys.mark(USER)]
    payload = b'{"type": "place_order", "request_id": "r1", "reply_to": "berth:answers:test"}'
    await valkey.run_script(
        harness.client,
        scripts.ENQUEUE,
        names,
        raw_enqueue_args(USER, "r1", payload, 4_000_000_000_000),
    )
    data = None
    while data is None:
        await asyncio.sleep(0.01)
        data = await harness.client.get(keys.response(USER, "r1"))
    answer = read_workers_answer(data, USER)
    assert answer.failure is not None
    assert answer.failure.code == "ORDER_REJECTED"
    assert await harness.client.llen(keys.processing(USER)) == 0
