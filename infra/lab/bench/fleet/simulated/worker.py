"""Simulates a worker: from its launch over the claim to its end, as the orchestrator sees it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from redis.exceptions import RedisError

from infra import tasks
from infra.lab.bench.fleet.simulated import calls
from infra.lab.bench.fleet.simulated.calls import (
    SimulatedCall,
    SimulatedConnections,
    SimulatedIdentity,
)
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.answers import sign_answer, worker_author
from worker_runtime.protocol.authentication import AssignmentKeys
from worker_runtime.protocol.errors import (
    ClaimRefused,
    Fenced,
    MalformedMessage,
    OrderRejected,
    WorkerUnavailable,
)
from worker_runtime.protocol.launch import ExitCode, WorkerConfig
from worker_runtime.protocol.messages import (
    Answer,
    Claim,
    ClaimReply,
    Connect,
    Failure,
    InboxMessage,
    OrderOutcome,
    OrderState,
    ReleaseClaim,
    ReloadCredentials,
    Shutdown,
    Signed,
    WorkerEvent,
    WorkerEventKind,
    decode,
)
from worker_runtime.protocol.requests import (
    AccountReport,
    ControlMessage,
    encode_report,
    parse_frame,
)
from worker_runtime.protocol.scripts import ANSWER, SETTLE_CLAIM
from worker_runtime.protocol.worker_reports import VALID_UNTIL, sign_event, sign_metadata


@dataclass(frozen=True, kw_only=True)
class SimulatedBehaviour:
    """The same for all workers of one simulated node."""

    #: From the launch to ready; a real worker process takes about as long on an idle core.
    start: float = 0.1
    #: A broker login; the paper exchange's takes about as long.
    connect: float = 0.01
    #: True if their users are active all the time: then each renewal shows a new last activity.
    used: bool = False
    #: True if each logs in to Valkey by its own name, as a real one, and has two connections then.
    own_login: bool = False


log = structlog.get_logger()

#: Seconds until a worker tries again what Valkey did not answer.
_RETRY_INTERVAL_S = 1.0


class _RequestHeader(msgspec.Struct):
    """The part of every request that says where its answer goes."""

    request_id: str
    reply_to: str = ""
    type: str = ""
    account_id: str = ""
    order_id: str = ""


class SimulatedEnding(Exception):  # not an error: how a worker leaves its loop
    """Raised inside a worker when it has to end."""

    def __init__(self, code: ExitCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _nothing_of(account_id: str) -> AccountReport:
    return AccountReport(
        account_id=account_id,
        taken_at_ms=_now_ms(),
        complete=True,
        absence_certain=True,
        reaches_ms=86_400_000,
    )


class SimulatedWorker:
    """Driven by `run`; its marks are renewed by `SimulatedMarkRenewer`."""

    def __init__(
        self, config: WorkerConfig, link: SimulatedConnections, habits: SimulatedBehaviour
    ) -> None:
        self.config = config
        self.link = link
        self._habits = habits
        self._identity = SimulatedIdentity.of(config)
        self._launched_at_ms = _now_ms()
        self._last_activity_ms = 0
        self._state = "PoolIdle"
        self._claim: Claim | None = None
        self._message_keys = AssignmentKeys(request=(), assignment=())
        self._reply: ClaimReply | None = None
        self._pops = 0
        self._events = 0
        self._owner_missing = False
        self._ending: asyncio.Future[SimulatedEnding] = asyncio.get_running_loop().create_future()

    async def run(self) -> ExitCode:
        """Runs until a message, a stop or a refused renewal ends it."""
        living = asyncio.create_task(self._live())
        await asyncio.wait({living, self._ending}, return_when=asyncio.FIRST_COMPLETED)
        if self._ending.done():
            await tasks.cancel_tasks(living)
            end = self._ending.result()
        else:
            end = living.result()
        with contextlib.suppress(RedisError, OSError):  # then the mark expires
            await self._farewell(end)
        return end.code

    def stop(self, code: ExitCode, reason: str) -> None:
        """Asks it to end; the first reason stays."""
        if not self._ending.done():
            self._ending.set_result(SimulatedEnding(code, reason))

    # --- renewals, driven from outside ------------------------------------------------------------

    def renewal(self) -> SimulatedCall:
        """Returns the call that renews the mark, or the pool entry of a worker without a user."""
        claim = self._claim
        if claim is None:
            return calls.announce(self.config, self._identity)
        if self._habits.used:
            self._last_activity_ms = _now_ms()
        return calls.renew(self.config, claim.user_id, claim.epoch, self._shown(claim))

    async def renewed(self, reply: Any) -> None:
        """Acts on the reply to a renewal, as a supervisor does."""
        if reply in (b"fenced", b"released"):
            code = ExitCode.FENCED if reply == b"fenced" else ExitCode.CLAIM_REFUSED
            self.stop(code, f"the renewal said {reply.decode()}")
        elif reply == b"no_owner" and not self._owner_missing:
            self._owner_missing = True
            with contextlib.suppress(RedisError, OSError):
                await self.link.execute(*self._event(WorkerEventKind.OWNER_MISSING, ""))
        elif reply == b"ok":
            self._owner_missing = False
        elif reply == b"":  # the pool does not have it
            ring = f"{self.config.pool} {self.config.worker_id}"
            with contextlib.suppress(RedisError, OSError):
                await self.link.execute(("RPUSH", keys.EVENT_BELL, ring))

    def _shown(self, claim: Claim) -> dict[str, str | int]:
        config, identity = self.config, self._identity
        shown: dict[str, str | int] = {
            "task": config.task_id,
            "worker": config.worker_id,
            "epoch": claim.epoch,
            "version": config.version,
            "state": self._state,
            "launched_at": self._launched_at_ms,
            "last_activity_ms": self._last_activity_ms,
            "session": 1,
            "public_key": identity.public_key.hex(),
            "proof": identity.proof.hex(),
            "pid": 0,
            "claim": claim.claim_id,
            VALID_UNTIL: _now_ms() + int(config.mark_ttl * 1000),
        }
        return sign_metadata(shown, claim.user_id, self._message_keys.assignment)

    # --- its life ---------------------------------------------------------------------------------

    async def _live(self) -> SimulatedEnding:
        await asyncio.sleep(self._habits.start)
        announced = False
        inbox = keys.pool_inbox(self.config.pool, self.config.worker_id)
        while True:
            try:
                if not announced:
                    await self.renewed(await self.link.run(self.renewal()))
                    announced = True
                bells = [inbox]
                if self._state == "Active" and self._claim is not None:
                    bells.append(keys.doorbell(self._claim.user_id))
                    await self._work()
                popped = await self.link.take(*bells)
                if popped is not None and popped[0] == inbox:
                    await self._handle_control(popped[1])
            except SimulatedEnding as end:
                return end
            except (RedisError, OSError) as error:
                log.warning(
                    "simulated.waits", worker=self.config.worker_id, error=type(error).__name__
                )
                await asyncio.sleep(_RETRY_INTERVAL_S)

    async def _handle_control(self, data: bytes) -> None:
        try:
            signed: Signed = decode(data, Signed)
            message: InboxMessage = decode(signed.payload, InboxMessage)
        except MalformedMessage as error:
            log.warning("simulated.dropped", worker=self.config.worker_id, code=error.code)
            return
        match message:
            case Claim():
                await self._claimed(message)
            case Connect() if self._claim is not None and self._reply is not None:
                await self._answer_claim(self._claim, self._reply)
            case ReleaseClaim() if self._claim is None or message.claim_id == self._claim.claim_id:
                raise SimulatedEnding(ExitCode.OK, f"released: {message.reason}")
            case _:
                log.warning(
                    "simulated.dropped", worker=self.config.worker_id, code="NOT_FOR_THIS_WORKER"
                )

    async def _claimed(self, claim: Claim) -> None:
        if self._claim is not None:
            if claim.claim_id == self._claim.claim_id and self._reply is not None:
                await self._answer_claim(claim, self._reply)
            return
        entry = keys.pool_worker(self.config.pool, self.config.worker_id)
        settled = await self.link.run(
            SimulatedCall(SETTLE_CLAIM, [entry], [claim.claim_id, "confirmed"])
        )
        if settled != b"confirmed":
            failure = Failure.of(ClaimRefused(f"the claim is {settled.decode()}"))
            await self._answer_claim(claim, self._reply_to(claim, 0, failure))
            raise SimulatedEnding(ExitCode.CLAIM_REFUSED, failure.detail)
        claimed_at = self._last_activity_ms = _now_ms()
        self._message_keys = self._identity.open_message_keys(claim)
        self._claim, self._state = claim, "Connecting"
        owned = await self.link.run(self.renewal())
        if owned != b"ok":
            error = (
                Fenced() if owned == b"fenced" else WorkerUnavailable("the user has no owner key")
            )
            await self._answer_claim(claim, self._reply_to(claim, claimed_at, Failure.of(error)))
            raise SimulatedEnding(ExitCode.FENCED, f"the mark was refused: {owned.decode()}")
        await asyncio.sleep(self._habits.connect)
        self._state = "Active"
        await self.link.run(self.renewal())
        await self.link.execute(*self._event(WorkerEventKind.CONNECTED, f"attempt {claim.attempt}"))
        self._reply = self._reply_to(claim, claimed_at, None)
        await self._answer_claim(claim, self._reply)

    def _reply_to(self, claim: Claim, claimed_at: int, failure: Failure | None) -> ClaimReply:
        return ClaimReply(
            claim_id=claim.claim_id,
            worker_id=self.config.worker_id,
            epoch=claim.epoch,
            attempt=claim.attempt,
            failure=failure,
            claimed_at_ms=claimed_at,
            connected_at_ms=0 if failure else _now_ms(),
        )

    async def _answer_claim(self, claim: Claim, reply: ClaimReply) -> None:
        await self._push_reply(claim.claim_id, reply)

    async def _push_reply(self, claim_id: str, reply: ClaimReply) -> None:
        key = keys.pool_reply(self.config.pool, self.config.worker_id, claim_id)
        proven = sealing.prove_reply(reply, self.config.launch_token)
        await self.link.execute(("RPUSH", key, proven), ("EXPIRE", key, keys.CLAIM_TTL_S))

    # --- work of an active one --------------------------------------------------------------------

    async def _work(self) -> None:
        """Handles this user's requests until none is left."""
        claim = self._claim
        while claim is not None:
            # The same number again after a lost reply, so that the same item comes.
            kind, item, *_ = await self.link.run(
                calls.pop(self.config, claim.user_id, claim.epoch, self._pops + 1)
            )
            self._pops += 1
            if kind == b"control":
                await self._controlled(claim, item)
            elif kind == b"request":
                await self._refuse(claim, item)
            elif kind == b"fenced":
                raise SimulatedEnding(ExitCode.FENCED, "another epoch owns the user")
            else:
                return

    async def _controlled(self, claim: Claim, item: bytes) -> None:
        self._last_activity_ms = _now_ms()
        try:
            signed: Signed = decode(item, Signed)
            message: ControlMessage = decode(signed.payload, ControlMessage)
        except MalformedMessage as error:
            log.warning("simulated.dropped", worker=self.config.worker_id, code=error.code)
            return
        if message.epoch != claim.epoch:
            return
        if isinstance(message, Shutdown):
            raise SimulatedEnding(ExitCode.OK, message.reason)
        if not isinstance(message, ReloadCredentials):
            return
        reply = ClaimReply(
            claim_id=message.reload_id,
            worker_id=self.config.worker_id,
            epoch=claim.epoch,
            attempt=1,
            connected_at_ms=_now_ms(),
        )
        await self._push_reply(message.reload_id, reply)

    async def _refuse(self, claim: Claim, item: bytes) -> None:
        """Refuses what is asked: a simulated worker has no broker, answers, and submits nothing."""
        self._last_activity_ms = _now_ms()
        try:
            frame = parse_frame(item)
            asked: _RequestHeader = decode(frame.payload, _RequestHeader)
        except MalformedMessage:
            await self.link.execute(("LREM", keys.processing(claim.user_id), 1, item))
            return
        if asked.type == "query_account":
            told = Answer(
                request_id=asked.request_id, report=encode_report(_nothing_of(asked.account_id))
            )
        else:
            failure = Failure.of(OrderRejected("a simulated worker trades nothing"))
            order_id = asked.order_id
            outcome = (
                OrderOutcome(order_id=order_id, state=OrderState.REJECTED) if order_id else None
            )
            told = Answer(request_id=asked.request_id, outcome=outcome, failure=failure)
        answer = sign_answer(
            self._message_keys.assignment,
            claim.user_id,
            worker_author(claim.epoch, self.config.worker_id),
            told,
        )
        call = SimulatedCall(
            ANSWER,
            keys.answering(claim.user_id, asked.request_id),
            [item, answer, keys.ANSWER_TTL_S, asked.reply_to],
        )
        while True:
            try:
                await self.link.run(call)
                return
            except (RedisError, OSError):  # may be repeated
                await asyncio.sleep(_RETRY_INTERVAL_S)

    # --- its end ----------------------------------------------------------------------------------

    async def _farewell(self, end: SimulatedEnding) -> None:
        """Sends the last event, then removes the mark or the pool entry."""
        config, claim = self.config, self._claim
        if claim is None:
            await self.link.execute(("DEL", keys.pool_worker(config.pool, config.worker_id)))
        elif end.code is not ExitCode.FENCED:
            await self.link.execute(*self._event(WorkerEventKind.CLOSED, end.reason))
            await self.link.run(calls.unmark(config, claim.user_id, claim.epoch))

    def _event(self, kind: WorkerEventKind, detail: str) -> list[tuple[Any, ...]]:
        claim = self._claim
        self._events += 2
        event = WorkerEvent(
            worker_id=self.config.worker_id,
            user_id=claim.user_id if claim else "-1",  # of nobody yet
            epoch=claim.epoch if claim else 0,
            sequence=self._events,
            kind=kind,
            at_ms=_now_ms(),
            detail=detail,
        )
        worker_id, entry = self.config.worker_id, sign_event(event, self._message_keys.assignment)
        return [("RPUSH", keys.events_of(worker_id), entry), ("RPUSH", keys.EVENT_BELL, worker_id)]
