"""What the worker tests play with: a small orchestrator and API in one, and workers as processes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import (
    Answer,
    Claim,
    ClaimReply,
    Credentials,
    Event,
    Message,
    OrderEvent,
    PlaceOrder,
    PriceType,
    SealedAccount,
    Side,
    TimeInForce,
    WorkerEvent,
    decode,
    encode,
)
from worker_runtime.protocol.scripts import CLAIM, CONTROL, ENQUEUE, OWN
from worker_runtime.valkey import Valkey

ROOT = Path(__file__).parents[3]
GENERATION = "g1"
#: Seconds a condition may take on a busy machine.
PATIENCE = 15.0

_numbers = itertools.count(1)
T = TypeVar("T")


def eventually(look: Callable[[], T | None], wanted: str, patience: float = PATIENCE) -> T:
    """Looks until what it sees is true; fails with `wanted` if that takes longer than `patience` s."""
    until = time.monotonic() + patience
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > until:
            raise AssertionError(f"not within {patience} s: {wanted}")
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Worker:
    """One worker as a process of its own, with its log and its broker's ledger."""

    def __init__(self, folder: Path, config: WorkerConfig, command: list[str] | None = None) -> None:
        self.config = config
        self.worker_id = config.worker_id
        self.folder = folder / config.worker_id
        self.folder.mkdir()
        self.log_path = self.folder / "log.jsonl"
        self.started = time.monotonic()
        module = command or ["-m", "tests.integration.worker.scripted", str(self.folder)]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *module], stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=ROOT
            )
        assert self.process.stdin is not None
        self.process.stdin.write(encode(config))
        self.process.stdin.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> list[dict[str, Any]]:
        lines = self.log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.log() if line["event"] == event]

    def ledger(self, what: str = "") -> list[dict[str, Any]]:
        path = self.folder / "ledger.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        entries = [json.loads(line) for line in lines]
        return [entry for entry in entries if not what or entry["what"] == what]

    def placed(self) -> list[str]:
        return [entry["order_id"] for entry in self.ledger("place")]

    def tell_broker(self, name: str) -> None:
        (self.folder / name).touch()

    def child(self, name: str) -> int:
        """The pid of `session` or `supervisor`; 0 while there is none."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        for pid in children.read_text().split():
            try:
                comm = Path(f"/proc/{pid}/comm").read_text().strip()
            except FileNotFoundError:
                continue
            if comm == f"berth-{name}"[:15] and alive(int(pid)):
                return int(pid)
        return 0

    def both(self) -> tuple[int, int]:
        """Session and supervisor, once both run."""
        return eventually(self._both, "a session and a supervisor")

    def _both(self) -> tuple[int, int] | None:
        session, supervisor = self.child("session"), self.child("supervisor")
        return (session, supervisor) if session and supervisor else None

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Stage:
    """Claims, sends orders and control messages, reads answers and events."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.client = Valkey(url, timeout=PATIENCE)
        self.key = Ed25519PrivateKey.generate()
        self.secret = os.urandom(32)
        self.pool = f"pool{next(_numbers)}"
        self.user = f"user-{next(_numbers)}"
        self.workers: list[Worker] = []

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
                "shutdown_timeout": 5.0,
                **changes,
            }
        )

    def launch(self, command: list[str] | None = None, **changes: Any) -> Worker:
        worker = Worker(self.folder, self.config(**changes), command)
        self.workers.append(worker)
        return worker

    def ready(self, **changes: Any) -> Worker:
        """A worker that has announced itself."""
        worker = self.launch(**changes)
        self.await_ready(worker)
        return worker

    def await_ready(self, worker: Worker) -> None:
        key = keys.pool_worker(self.pool, worker.worker_id)
        eventually(lambda: self.client.execute("HGET", key, "state"), f"{worker.worker_id} is ready")

    def active(self, accounts: dict[str, str] | None = None, **changes: Any) -> Worker:
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
        assert self.client.run(OWN, [keys.owner(self.user)], [epoch, worker_id, generation]) == b"ok"

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
        clear = encode(Credentials(api_key=api_key, secret_key="s"))
        return SealedAccount(
            account_id=account_id,
            broker="scripted",
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

    def public_key(self, worker: Worker) -> bytes:
        key = keys.pool_worker(self.pool, worker.worker_id)
        public_key: bytes = self.client.execute("HGET", key, "public_key")
        return public_key

    def claim_message(
        self, worker: Worker, claim_id: str, *, epoch: int = 1, accounts: dict[str, str] | None = None
    ) -> Claim:
        public_key = self.public_key(worker)
        return Claim(
            claim_id=claim_id,
            worker_id=worker.worker_id,
            user_id=self.user,
            epoch=epoch,
            generation=GENERATION,
            connect_timeout=5.0,
            accounts=[
                self.sealed(
                    public_key, name, api_key, worker_id=worker.worker_id, claim_id=claim_id, epoch=epoch
                )
                for name, api_key in ({"a1": "good"} if accounts is None else accounts).items()
            ],
        )

    def push(self, worker: Worker, message: Message) -> None:
        self.push_raw(worker, sealing.sign(message, self.key))

    def push_raw(self, worker: Worker, data: bytes) -> None:
        self.client.execute("RPUSH", keys.pool_inbox(self.pool, worker.worker_id), data)

    def claim(
        self,
        worker: Worker,
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
        got = self.client.execute("BLPOP", keys.pool_reply(self.pool, claim_id), PATIENCE - 2)
        assert got is not None, "no reply to the claim"
        reply: ClaimReply = decode(got[1], ClaimReply)
        return reply

    def replies(self, claim_id: str) -> int:
        count: int = self.client.execute("LLEN", keys.pool_reply(self.pool, claim_id))
        return count

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

    def enqueue(self, order: PlaceOrder, ttl_ms: int = 10_000) -> bytes:
        return self.enqueue_raw(order.request_id, encode(order), ttl_ms)

    def enqueue_raw(self, request_id: str, payload: bytes, ttl_ms: int = 10_000) -> bytes:
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
        self.client.run(CONTROL, [keys.control(self.user), keys.doorbell(self.user)], [data])

    def events(self) -> list[WorkerEvent | OrderEvent]:
        entries = self.client.execute("XRANGE", keys.EVENTS, "-", "+")
        events: list[WorkerEvent | OrderEvent] = [decode(fields[1], Event) for _, fields in entries]
        return [event for event in events if event.user_id == self.user]

    def kinds(self) -> list[str]:
        return [event.kind.value for event in self.events() if isinstance(event, WorkerEvent)]

    def states(self, order_id: str) -> list[str]:
        found = [event for event in self.events() if isinstance(event, OrderEvent)]
        return [event.state.value for event in found if event.order_id == order_id]

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
