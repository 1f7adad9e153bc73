"""A real worker, claimed and connected by a small orchestrator,
whose broker calls can be made to hang."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from infra.lab.bench.starvation.cpu_group import CpuGroup
from infra.local.process import ServerFailed
from infra.node.worker import clean_environment
from infra.processes import end_with_parent
from infra.vault.message_secret import MessageSecrets
from infra.vault.secret_versions import new_version
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.answers import read_answer
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import (
    Answer,
    Claim,
    Credentials,
    PlaceOrder,
    PriceType,
    SealedAccount,
    Side,
    TimeInForce,
    encode,
)
from worker_runtime.protocol.requests import OPEN_SWITCH, sign_request
from worker_runtime.protocol.scripts import ADMIT_WORKER, CLAIM, ENQUEUE, SET_OWNER, Script

EPOCH = 1
_POOL = "bench"
_GENERATION = "bench"
#: Seconds until a worker must be ready, and until it must be connected.
_START_TIMEOUT_S = 60.0


class OrchestratorCommands:
    """Valkey, as the small orchestrator uses it. One connection at a time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.redis: Any = Redis.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_timeout=_START_TIMEOUT_S + 10
        )

    def run(self, script: Script, names: list[str], args: list[Any]) -> Any:
        return self.redis.eval(script.source, len(names), *names, *args)

    def own(self, user_id: str, worker_id: str, switch: list[str | int]) -> None:
        """Makes the worker the owner of the user; `switch` as `UserSwitch.words` gives it."""
        names = [keys.owner(user_id), keys.switch(user_id)]
        self.run(SET_OWNER, names, [EPOCH, worker_id, _GENERATION, *switch])

    def close(self) -> None:
        self.redis.close()


class ClaimedWorker:
    """The processes of one worker inside a CPU group,
    Active for one user with one paper account."""

    def __init__(
        self,
        commands: OrchestratorCommands,
        user_id: str,
        exchange: str,
        *,
        block: float,
        mark_period: float = 5.0,
    ) -> None:
        """Starts a worker whose broker calls will take `block` seconds. Limits that would cut them
        short lie above."""
        self.user_id = user_id
        self.worker_id = f"worker-{user_id}"
        self._commands = commands
        self._key = Ed25519PrivateKey.generate()
        self._secrets = MessageSecrets([new_version(1)])
        self.config = WorkerConfig(
            worker_id=self.worker_id,
            pool=_POOL,
            valkey_url=commands.url,
            launch_token=os.urandom(32),
            orchestrator_keys=(self._key.public_key().public_bytes_raw(),),
            task_id=f"task-{user_id}",
            paper_exchange=exchange,
            # A broker call never takes longer than the lease, so the lease must outlast the call.
            mark_ttl=max(keys.MARK_TTL_S, block + 30.0),
            mark_period=mark_period,
            pulse_timeout=block + 60.0,
            broker_timeout=block + 20.0,
            health_period=3600.0,
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, folder: Path, group: CpuGroup) -> None:
        """Starts it inside the group and makes it Active. Raises `ServerFailed`."""
        folder.mkdir()
        with (folder / "worker.log").open("wb") as log:
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "worker_runtime", self.worker_id],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=clean_environment(os.environ, folder),
                start_new_session=True,
                preexec_fn=end_with_parent(os.getpid()),
            )
        group.add(process.pid)  # it does nothing of its own before it has its config
        assert process.stdin is not None  # noqa: S101 — a pipe was asked for
        process.stdin.write(encode(self.config))
        process.stdin.close()
        self._claim()

    def _claim(self) -> None:
        commands, claim_id = self._commands, f"claim-{self.user_id}"
        until = time.monotonic() + _START_TIMEOUT_S
        names = [keys.pool_ready(_POOL), keys.pool_claim(_POOL, claim_id)]
        args = [claim_id, keys.pool_worker_prefix(_POOL), keys.CLAIM_TTL_S]
        entry = keys.pool_worker(_POOL, self.worker_id)
        admitting = [entry, names[0], keys.pool_claim(_POOL, ""), keys.pool_born(_POOL, "")]
        while (claimed := commands.run(CLAIM, names, args))[0] == b"empty":
            # The worker's pump does the same.
            commands.run(ADMIT_WORKER, admitting, [self.worker_id, "", keys.CLAIM_TTL_S])
            if time.monotonic() > until:
                raise ServerFailed(f"the worker was not ready within {_START_TIMEOUT_S:.0f} s")
            time.sleep(0.05)
        request_keys = self._secrets.request_keys(self.user_id)
        commands.own(self.user_id, self.worker_id, OPEN_SWITCH.words(request_keys, self.user_id))
        account_id = self.account_id
        sealed = sealing.seal(
            encode(Credentials(api_key="key", secret_key="secret", person_id=self.user_id)),  # noqa: S106
            claimed[2],
            user_id=self.user_id,
            account_id=account_id,
            epoch=EPOCH,
            claim_id=claim_id,
            worker_id=self.worker_id,
        )
        account = SealedAccount(
            budgets=[self.user_id],
            account_id=account_id,
            broker="paper",
            broker_type="stock",
            simulation=True,
            version=1,
            sealed=sealed,
        )
        claim = Claim(
            claim_id=claim_id,
            worker_id=self.worker_id,
            user_id=self.user_id,
            epoch=EPOCH,
            generation=_GENERATION,
            connect_timeout=_START_TIMEOUT_S,
            accounts=[account],
            sealed_keys=sealing.seal_message_keys(
                self._secrets.for_worker(self.user_id, EPOCH),
                claimed[2],
                user_id=self.user_id,
                epoch=EPOCH,
                claim_id=claim_id,
                worker_id=self.worker_id,
            ),
        )
        inbox = keys.pool_inbox(_POOL, self.worker_id)
        commands.redis.rpush(inbox, sealing.sign(claim, self._key))
        answered = commands.redis.blpop(
            [keys.pool_reply(_POOL, self.worker_id, claim_id)], _START_TIMEOUT_S
        )
        if answered is None:
            raise ServerFailed(f"the worker was not connected within {_START_TIMEOUT_S:.0f} s")
        reply = sealing.open_reply(answered[1], self.config.launch_token)
        if reply.failure is not None:
            raise ServerFailed(f"the worker: {reply.failure.code}: {reply.failure.detail}")

    @property
    def account_id(self) -> str:
        return f"acc-{self.user_id}"

    def enqueue(self, deadline: float) -> str:
        """Sends one order, to be submitted within `deadline` seconds; its request id."""
        request_id, user_id = uuid4().hex, self.user_id
        order = PlaceOrder(
            request_id=request_id,
            order_id=request_id,
            user_id=user_id,
            account_id=self.account_id,
            symbol="2330",
            side=Side.BUY,
            quantity=1,
            price_type=PriceType.MARKET,
            price=None,
            time_in_force=TimeInForce.IOC,
            tag="bench",
            reply_to="",
            generation=_GENERATION,
        )
        payload, (seconds, micros) = encode(order), self._commands.redis.time()
        deadline_ms = int(seconds) * 1000 + int(micros) // 1000 + int(deadline * 1000)
        mac = sign_request(
            self._secrets.request_keys(user_id), user_id, request_id, deadline_ms, payload
        )
        args = [request_id, payload, deadline_ms, 3_600_000, mac]
        self._commands.run(ENQUEUE, keys.enqueueing(user_id, request_id), args)
        return request_id

    def answer(self, request_id: str) -> Answer | None:
        """Returns the worker's answer, if it is there."""
        data = self._commands.redis.get(keys.response(self.user_id, request_id))
        return None if data is None else read_answer(data).answer

    def wait(self) -> None:
        """Reaps it, once the group was ended."""
        if self._process is not None:
            self._process.wait(10)


class HangingCalls:
    """Sends orders one after the other, each of which holds the session in its broker call."""

    def __init__(self, worker: ClaimedWorker, *, block: float, pause: float) -> None:
        self._worker = worker
        self._block = block
        self._pause = pause
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        #: Seconds that each answered call took.
        self.took: list[float] = []

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(self._pause):
            began = time.monotonic()
            request_id = self._worker.enqueue(self._block + 60.0)
            while self._worker.answer(request_id) is None:
                if self._ending.wait(0.1):
                    return
            self.took.append(time.monotonic() - began)
