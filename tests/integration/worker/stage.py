"""What the worker tests play with: a small orchestrator and API in one."""

from __future__ import annotations

import itertools
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.integration.worker.worker import PATIENCE, SpawnedWorker, eventually
from worker_runtime.process.valkey import Valkey
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import (
    AccountReported,
    Answer,
    Claim,
    ClaimReply,
    Credentials,
    Event,
    Message,
    OrderEvent,
    PlaceOrder,
    PriceType,
    ReloadCredentials,
    SealedAccount,
    Side,
    TimeInForce,
    WorkerEvent,
    decode,
    encode,
)
from worker_runtime.protocol.requests import OPEN_SWITCH, AccountReport, decode_report
from worker_runtime.protocol.scripts import CLAIM, ENQUEUE, SEND_CONTROL, SET_OWNER

GENERATION = "g1"
#: Seconds that a login may take, and milliseconds that an order may wait, in tests of something else: of the
#: processes that it passes, each may stand still for a while.
CONNECT_TIMEOUT = 15.0
TTL = 60_000

_numbers = itertools.count(1)


class WorkerStage:
    """Claims, sends orders and control messages, reads answers and events."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.client = Valkey(url, timeout=PATIENCE)
        self.key = Ed25519PrivateKey.generate()
        self.secret = os.urandom(32)
        self.pool = f"pool{next(_numbers)}"
        self.user = f"user-{next(_numbers)}"
        self.workers: list[SpawnedWorker] = []
        #: The broker of all accounts.
        self.broker = "scripted"
        #: The person id of all accounts.
        self.person = ""
        #: What goes with the next claim or reload.
        self.open_orders: list[PlaceOrder] = []

    # --- workers

    def config(self, **changes: Any) -> WorkerConfig:
        worker_id = changes.pop("worker_id", f"w-{next(_numbers)}")
        return WorkerConfig(
            **{
                "worker_id": worker_id,
                "pool": self.pool,
                "valkey_url": self.url,
                "launch_token": sealing.launch_token(self.secret, worker_id),
                "orchestrator_key": self.key.public_key().public_bytes_raw(),
                "task_id": f"task-{worker_id}",
                "version": "test",
                "shutdown_timeout": 15.0,
                **changes,
            }
        )

    def launch(self, command: list[str] | None = None, **changes: Any) -> SpawnedWorker:
        worker = SpawnedWorker(self.folder, self.config(**changes), command)
        self.workers.append(worker)
        return worker

    def ready(self, **changes: Any) -> SpawnedWorker:
        """A worker that has announced itself."""
        worker = self.launch(**changes)
        self.await_ready(worker)
        return worker

    def await_ready(self, worker: SpawnedWorker) -> None:
        key = keys.pool_worker(self.pool, worker.worker_id)
        eventually(lambda: self.client.execute("HGET", key, "state"), f"{worker.worker_id} is ready")

    def active(self, accounts: dict[str, str] | None = None, **changes: Any) -> SpawnedWorker:
        """A worker claimed for `self.user` and connected."""
        worker = self.ready(**changes)
        reply = self.claim(worker, accounts=accounts)
        assert reply.failure is None, reply
        return worker

    # --- claims

    def take(self, claim_id: str) -> list[bytes]:
        found: list[bytes] = self.client.run(
            CLAIM,
            [keys.pool_ready(self.pool), keys.pool_claim(self.pool, claim_id)],
            [claim_id, keys.pool_worker_prefix(self.pool), keys.CLAIM_TTL],
        )
        return found

    def own(self, worker_id: str, epoch: int, generation: str = GENERATION) -> None:
        names = [keys.owner(self.user), keys.switch(self.user)]
        assert (
            self.client.run(SET_OWNER, names, [epoch, worker_id, generation, *OPEN_SWITCH.words()]) == b"ok"
        )

    def sealed(
        self,
        public_key: bytes,
        account_id: str,
        api_key: str,
        *,
        worker_id: str,
        claim_id: str,
        **changes: Any,
    ) -> SealedAccount:
        epoch = changes.get("epoch", 1)
        clear = encode(Credentials(api_key=api_key, secret_key="s", person_id=self.person))
        return SealedAccount(
            account_id=account_id,
            broker=self.broker,
            broker_type="stock",
            simulation=True,
            version=changes.get("version", 1),
            sealed=sealing.seal(
                clear,
                public_key,
                user_id=self.user,
                account_id=account_id,
                epoch=epoch,
                claim_id=claim_id,
                worker_id=worker_id,
            ),
        )

    def public_key(self, worker: SpawnedWorker) -> bytes:
        key = keys.pool_worker(self.pool, worker.worker_id)
        public_key: bytes = self.client.execute("HGET", key, "public_key")
        return public_key

    def claim_message(
        self, worker: SpawnedWorker, claim_id: str, *, epoch: int = 1, accounts: dict[str, str] | None = None
    ) -> Claim:
        public_key = self.public_key(worker)
        return Claim(
            claim_id=claim_id,
            worker_id=worker.worker_id,
            user_id=self.user,
            epoch=epoch,
            generation=GENERATION,
            connect_timeout=CONNECT_TIMEOUT,
            open_orders=self.open_orders,
            accounts=[
                self.sealed(
                    public_key, name, api_key, worker_id=worker.worker_id, claim_id=claim_id, epoch=epoch
                )
                for name, api_key in ({"a1": "good"} if accounts is None else accounts).items()
            ],
        )

    def push(self, worker: SpawnedWorker, message: Message) -> None:
        self.push_raw(worker, sealing.sign(message, self.key))

    def push_raw(self, worker: SpawnedWorker, data: bytes) -> None:
        self.client.execute("RPUSH", keys.pool_inbox(self.pool, worker.worker_id), data)

    def claim(
        self,
        worker: SpawnedWorker,
        *,
        claim_id: str = "c1",
        epoch: int = 1,
        accounts: dict[str, str] | None = None,
    ) -> ClaimReply:
        """The whole claim of a worker that must be the next one in the pool."""
        status, found, public_key, proof, *_ = self.take(claim_id)
        assert status in (b"claimed", b"again")
        assert found.decode() == worker.worker_id
        token = sealing.launch_token(self.secret, worker.worker_id)
        assert sealing.check_key(token, worker.worker_id, public_key, proof)
        self.own(worker.worker_id, epoch)
        self.push(worker, self.claim_message(worker, claim_id, epoch=epoch, accounts=accounts))
        return self.reply(claim_id)

    def reply(self, claim_id: str) -> ClaimReply:
        got = self.client.execute("BLPOP", keys.pool_reply(self.pool, claim_id), PATIENCE - 5)
        assert got is not None, "no reply to the claim"
        reply: ClaimReply = decode(got[1], ClaimReply)
        return reply

    def replies(self, claim_id: str) -> int:
        count: int = self.client.execute("LLEN", keys.pool_reply(self.pool, claim_id))
        return count

    # --- credentials for a worker that runs

    def proven_key(self, worker: SpawnedWorker) -> bytes:
        """The public key in the metadata, if its proof holds; else b''."""
        metadata = self.metadata()
        key, proof = (bytes.fromhex(metadata.get(name, "")) for name in ("public_key", "proof"))
        token = sealing.launch_token(self.secret, worker.worker_id)
        return key if sealing.check_key(token, worker.worker_id, key, proof) else b""

    def push_reload(
        self, worker: SpawnedWorker, public_key: bytes, reload_id: str, **accounts: tuple[str, int]
    ) -> None:
        """Sends credentials (api key and version by account), sealed to `public_key`."""
        sealed = [
            self.sealed(
                public_key,
                name,
                api_key,
                worker_id=worker.worker_id,
                claim_id=reload_id,
                version=version,
            )
            for name, (api_key, version) in accounts.items()
        ]
        self.control(
            ReloadCredentials(
                reload_id=reload_id,
                user_id=self.user,
                epoch=1,
                worker_id=worker.worker_id,
                accounts=sealed,
                open_orders=self.open_orders,
            )
        )

    def reload(self, worker: SpawnedWorker, reload_id: str, **accounts: tuple[str, int]) -> ClaimReply:
        """New credentials, sealed to the present key, and the worker's reply."""
        # A renewal that was begun before the session had its key may come after the one that shows it.
        key = eventually(lambda: self.proven_key(worker), "a proven key")
        self.push_reload(worker, key, reload_id, **accounts)
        return self.reply(reload_id)

    def revive(self, worker: SpawnedWorker, session: int = 2, **accounts: tuple[str, int]) -> ClaimReply:
        """What the orchestrator does when the session with this number tells that it has no credentials."""
        eventually(lambda: self.kinds().count("session_replaced") == session - 1, f"session {session} waits")
        eventually(lambda: self.metadata().get("session") == str(session), f"session {session} is shown")
        return self.reload(worker, f"session-{session}", **(accounts or {"a1": ("good", 1)}))

    # --- orders

    def order(self, **changes: Any) -> PlaceOrder:
        number = next(_numbers)
        order = PlaceOrder(
            request_id=f"r{number}",
            order_id=f"o{number}",
            user_id=self.user,
            account_id="a1",
            symbol="2330",
            side=Side.BUY,
            quantity=2,
            price_type=PriceType.LIMIT,
            price=Decimal("100.5"),
            time_in_force=TimeInForce.ROD,
            tag=f"t{number}"[:6],
            reply_to=keys.answers("test"),
            generation=GENERATION,
        )
        return msgspec.structs.replace(order, **changes)

    def enqueue(self, order: PlaceOrder, ttl_ms: int = TTL) -> bytes:
        return self.enqueue_raw(order.request_id, encode(order), ttl_ms)

    def enqueue_raw(self, request_id: str, payload: bytes, ttl_ms: int = TTL) -> bytes:
        _, item, _ = self.client.run(
            ENQUEUE,
            [
                keys.seen(self.user, request_id),
                keys.requests(self.user),
                keys.doorbell(self.user),
                keys.mark(self.user),
            ],
            [request_id, payload, ttl_ms, 3_600_000],
        )
        assert isinstance(item, bytes)
        return item

    def answer(self, request_id: str) -> Answer:
        key = keys.response(self.user, request_id)
        data = eventually(lambda: self.client.execute("GET", key), f"an answer to {request_id}")
        answer: Answer = decode(data, Answer)
        return answer

    def send(self, **changes: Any) -> Answer:
        """One order, and its answer."""
        order = self.order(**changes)
        self.enqueue(order)
        return self.answer(order.request_id)

    def now_ms(self) -> int:
        """Valkey's clock."""
        seconds, micros = self.client.execute("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def processing(self) -> int:
        count: int = self.client.execute("LLEN", keys.processing(self.user))
        return count

    # --- control, events, mark

    def control(self, message: Message) -> None:
        self.control_raw(sealing.sign(message, self.key))

    def control_raw(self, data: bytes) -> None:
        self.client.run(SEND_CONTROL, [keys.control(self.user), keys.doorbell(self.user)], [data])

    def events(self, *, repeats: bool = False) -> list[Event]:
        """Each once, unless with `repeats`: what the server took without saying so in time is sent again."""
        written = [fields[1] for _, fields in self.client.execute("XRANGE", keys.EVENTS, "-", "+")]
        different = written if repeats else list(dict.fromkeys(written))
        events: list[Event] = [decode(data, Event) for data in different]
        return [event for event in events if event.user_id == self.user]

    def kinds(self) -> list[str]:
        return [event.kind.value for event in self.events() if isinstance(event, WorkerEvent)]

    def states(self, order_id: str) -> list[str]:
        found = [event for event in self.events() if isinstance(event, OrderEvent)]
        return [event.state.value for event in found if event.order_id == order_id]

    def reports(self) -> list[AccountReport]:
        return [decode_report(event.report) for event in self.events() if isinstance(event, AccountReported)]

    def mark(self) -> str:
        value: bytes | None = self.client.execute("GET", keys.mark(self.user))
        return value.decode() if value else ""

    def metadata(self) -> dict[str, str]:
        flat: list[bytes] = self.client.execute("HGETALL", keys.metadata(self.user))
        return {flat[n].decode(): flat[n + 1].decode() for n in range(0, len(flat), 2)}

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.client.close()
