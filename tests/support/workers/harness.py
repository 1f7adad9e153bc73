"""Contains the harness of worker tests: a small orchestrator and API in one."""

from __future__ import annotations

import itertools
import os
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.support.message_signing import (
    SECRETS,
    raw_enqueue_args,
    read_workers_answer,
    switch_words,
)
from tests.support.waiting import eventually
from tests.support.workers.process import PATIENCE, SpawnedWorker
from worker_runtime.process.valkey import Valkey
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import (
    AccountReported,
    Answer,
    Claim,
    ClaimReply,
    ControlHeader,
    Credentials,
    Event,
    Message,
    OrderEvent,
    PlaceOrder,
    PriceType,
    ReloadCredentials,
    SealedAccount,
    Side,
    Signed,
    TimeInForce,
    WorkerEvent,
    decode,
    encode,
)
from worker_runtime.protocol.requests import AccountReport, decode_report
from worker_runtime.protocol.scripts import ADMIT_WORKER, CLAIM, ENQUEUE, SEND_CONTROL, SET_OWNER
from worker_runtime.protocol.worker_reports import payload_of

GENERATION = "g1"
#: Seconds that a login may take, and milliseconds that an order may wait, in tests of something
#: else: long.
CONNECT_TIMEOUT = 15.0
TTL = 60_000

_numbers = itertools.count(1)


class WorkerHarness:
    """Claims, sends orders and control messages, reads answers and events."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.client = Valkey(url, timeout=PATIENCE)
        self.key = Ed25519PrivateKey.generate()
        self.secret = os.urandom(32)
        self.secrets = SECRETS
        self.pool = f"pool{next(_numbers)}"
        self.user = f"user-{next(_numbers)}"
        self.workers: list[SpawnedWorker] = []
        self._controls = 0
        #: The broker of all accounts, their market, and their secret key.
        self.broker = "scripted"
        self.broker_type = "stock"
        self.secret_key = "s"
        #: The broker's own id of an account, and whether it is a simulation.
        self.numbers: dict[str, tuple[str, bool]] = {}
        #: The person id of all accounts.
        self.person = ""
        self.books_first = False
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
                "orchestrator_keys": (self.key.public_key().public_bytes_raw(),),
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
        eventually(lambda: self.admit(worker), f"{worker.worker_id} is ready")

    def admit(self, worker: SpawnedWorker) -> bytes | None:
        """The state of an announced worker, which is taken into the pool."""
        entry, reserved = (
            keys.pool_worker(self.pool, worker.worker_id),
            worker.config.reserved_claim,
        )
        pool = keys.pool_ready(self.pool), keys.pool_claim(self.pool, reserved)
        names = [entry, *pool, keys.pool_born(self.pool, reserved)]
        self.client.run(ADMIT_WORKER, names, [worker.worker_id, reserved, keys.CLAIM_TTL_S])
        return cast("bytes | None", self.client.execute("HGET", entry, "state"))

    def active(self, accounts: dict[str, str] | None = None, **changes: Any) -> SpawnedWorker:
        """A worker claimed for `self.user` and connected."""
        worker = self.ready(**changes)
        reply = self.claim(worker, accounts=accounts)
        assert reply.failure is None, reply
        return worker

    # --- claims

    def take(self, claim_id: str) -> list[bytes]:
        names = [keys.pool_ready(self.pool), keys.pool_claim(self.pool, claim_id)]
        words: list[str | int] = [claim_id, keys.pool_worker_prefix(self.pool), keys.CLAIM_TTL_S]
        return cast("list[bytes]", self.client.run(CLAIM, names, words))

    def own(self, worker_id: str, epoch: int, generation: str = GENERATION) -> None:
        names = [keys.owner(self.user), keys.switch(self.user)]
        words: list[str | int] = [epoch, worker_id, generation, *switch_words(self.user)]
        assert self.client.run(SET_OWNER, names, words) == b"ok"

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
        number, simulation = self.numbers.get(account_id, ("", True))
        clear = encode(
            Credentials(api_key=api_key, secret_key=self.secret_key, person_id=self.person)
        )
        return SealedAccount(
            account_id=account_id,
            broker=self.broker,
            broker_type=self.broker_type,
            simulation=simulation,
            number=number,
            version=changes.get("version", 1),
            budgets=[self.person or account_id],
            books_first=self.books_first,
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

    def sealed_keys(
        self, public_key: bytes, worker: SpawnedWorker, claim_id: str, epoch: int = 1
    ) -> bytes:
        return sealing.seal_message_keys(
            self.secrets.for_worker(self.user, epoch),
            public_key,
            user_id=self.user,
            epoch=epoch,
            claim_id=claim_id,
            worker_id=worker.worker_id,
        )

    def public_key(self, worker: SpawnedWorker) -> bytes:
        entry = keys.pool_worker(self.pool, worker.worker_id)
        return bytes(self.client.execute("HGET", entry, "public_key"))

    def claim_message(
        self,
        worker: SpawnedWorker,
        claim_id: str,
        *,
        epoch: int = 1,
        accounts: dict[str, str] | None = None,
    ) -> Claim:
        public_key = self.public_key(worker)
        return Claim(
            claim_id=claim_id,
            worker_id=worker.worker_id,
            user_id=self.user,
            epoch=epoch,
            generation=GENERATION,
            connect_timeout=CONNECT_TIMEOUT,
            sealed_keys=self.sealed_keys(public_key, worker, claim_id, epoch),
            open_orders=self.open_orders,
            accounts=[
                self.sealed(
                    public_key,
                    name,
                    api_key,
                    worker_id=worker.worker_id,
                    claim_id=claim_id,
                    epoch=epoch,
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
        status, taken_worker_id, public_key, proof, *_ = self.take(claim_id)
        assert status in (b"claimed", b"again")
        assert taken_worker_id.decode() == worker.worker_id
        token = sealing.launch_token(self.secret, worker.worker_id)
        assert sealing.check_key(token, worker.worker_id, public_key, proof)
        self.own(worker.worker_id, epoch)
        self.push(worker, self.claim_message(worker, claim_id, epoch=epoch, accounts=accounts))
        return self.reply(claim_id)

    def reply(self, claim_id: str) -> ClaimReply:
        got = self.client.execute("BLPOP", *self._reply_keys(claim_id), PATIENCE - 5)
        assert got is not None, "no reply to the claim"
        signed: Signed = decode(got[1], Signed)
        named: ClaimReply = decode(signed.payload, ClaimReply)
        return sealing.open_reply(got[1], sealing.launch_token(self.secret, named.worker_id))

    def replies(self, claim_id: str) -> int:
        return sum(self.client.execute("LLEN", key) for key in self._reply_keys(claim_id))

    def _reply_keys(self, claim_id: str) -> list[str]:
        """Of all workers."""
        return [keys.pool_reply(self.pool, worker.worker_id, claim_id) for worker in self.workers]

    # --- credentials for a worker that runs

    def proven_key(self, worker: SpawnedWorker) -> bytes:
        """The public key in the metadata, if its proof holds; else b''."""
        metadata = self.metadata()
        key, proof = (bytes.fromhex(metadata.get(name, "")) for name in ("public_key", "proof"))
        token = sealing.launch_token(self.secret, worker.worker_id)
        return key if sealing.check_key(token, worker.worker_id, key, proof) else b""

    def push_reload(
        self, worker: SpawnedWorker, public_key: bytes, reload_id: str, **accounts: tuple[str, int]
    ) -> bytes:
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
        return self.control(
            ReloadCredentials(
                reload_id=reload_id,
                user_id=self.user,
                epoch=1,
                worker_id=worker.worker_id,
                accounts=sealed,
                sealed_keys=self.sealed_keys(public_key, worker, reload_id),
                open_orders=self.open_orders,
            )
        )

    def reload(
        self, worker: SpawnedWorker, reload_id: str, **accounts: tuple[str, int]
    ) -> ClaimReply:
        """New credentials, sealed to the present key, and the worker's reply."""
        # A renewal that was begun before the session had its key may come after the one that shows
        # it.
        key = eventually(lambda: self.proven_key(worker), "a proven key")
        self.push_reload(worker, key, reload_id, **accounts)
        return self.reply(reload_id)

    def revive(
        self, worker: SpawnedWorker, session: int = 2, **accounts: tuple[str, int]
    ) -> ClaimReply:
        """What the orchestrator does when the session with this number tells that it has no
        credentials."""
        eventually(
            lambda: self.kinds().count("session_replaced") == session - 1,
            f"session {session} waits",
        )
        eventually(
            lambda: self.metadata().get("session") == str(session), f"session {session} is shown"
        )
        return self.reload(worker, f"session-{session}", **(accounts or {"a1": ("good", 1)}))

    # --- orders

    def order(self, **changes: Any) -> PlaceOrder:
        number = next(_numbers)
        order = PlaceOrder(
            request_id=f"r{number}",
            order_id=str(uuid.uuid4()),
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
            raw_enqueue_args(self.user, request_id, payload, self.now_ms() + ttl_ms),
        )
        assert isinstance(item, bytes)
        return item

    def push_item(self, item: bytes) -> None:
        """What somebody does who can only write to Valkey."""
        self.client.execute("LPUSH", keys.requests(self.user), item)
        self.client.execute("LPUSH", keys.doorbell(self.user), "1")

    def answer(self, request_id: str) -> Answer:
        key = keys.response(self.user, request_id)
        data = eventually(lambda: self.client.execute("GET", key), f"an answer to {request_id}")
        return read_workers_answer(data, self.user)

    def answered(self, request_id: str) -> bool:
        return bool(self.client.execute("EXISTS", keys.response(self.user, request_id)))

    def waiting(self) -> int:
        """Requests that are queued or in hand."""
        lists = (keys.requests, keys.processing)
        return sum(int(self.client.execute("LLEN", name(self.user))) for name in lists)

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
        return int(self.client.execute("LLEN", keys.processing(self.user)))

    # --- control, events, mark

    def control(self, message: ControlHeader) -> bytes:
        """Sends the message, a reload with the next number; returns what was sent."""
        if isinstance(message, ReloadCredentials):
            self._controls += 1
            message = msgspec.structs.replace(message, number=self._controls)
        signed = sealing.sign(message, self.key)
        self.control_raw(signed)
        return signed

    def control_raw(self, data: bytes) -> None:
        self.client.run(SEND_CONTROL, [keys.control(self.user), keys.doorbell(self.user)], [data])

    def events(self, *, repeats: bool = False) -> list[Event]:
        """Each once, unless with `repeats`: what the server took without saying so in time is sent
        again."""
        lists = self.client.execute("KEYS", keys.events_of("*"))  # which no orchestrator empties
        oldest = sorted(lists, key=lambda name: (len(name), name))
        written = [
            payload_of(item)
            for name in oldest
            for item in self.client.execute("LRANGE", name, 0, -1)
        ]
        different = written if repeats else list(dict.fromkeys(written))
        events: list[Event] = [decode(data, Event) for data in different]
        return [event for event in events if event.user_id == self.user]

    def kinds(self) -> list[str]:
        return [event.kind.value for event in self.events() if isinstance(event, WorkerEvent)]

    def states(self, order_id: str) -> list[str]:
        order_events = [event for event in self.events() if isinstance(event, OrderEvent)]
        return [event.state.value for event in order_events if event.order_id == order_id]

    def reports(self) -> list[AccountReport]:
        return [
            decode_report(event.report)
            for event in self.events()
            if isinstance(event, AccountReported)
        ]

    def mark(self) -> str:
        return bytes(self.client.execute("GET", keys.mark(self.user)) or b"").decode()

    def metadata(self) -> dict[str, str]:
        flat: list[bytes] = self.client.execute("HGETALL", keys.metadata(self.user))
        return {flat[n].decode(): flat[n + 1].decode() for n in range(0, len(flat), 2)}

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.client.close()
