"""What the session has to tell: events and answers, in order, kept until Valkey has taken them.

Everything in it may be sent twice: events are recognised by their ids, `answer.lua` is safe to repeat. So
a lost reply costs a repeat and never an answer.
"""

from __future__ import annotations

from collections import deque

import hiredis

from worker_runtime.process.clock import Backoff, wall_ms
from worker_runtime.process.log import Log
from worker_runtime.process.mark import new_worker_event
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import (
    Argument,
    Command,
    Valkey,
    ValkeyFailed,
    ValkeyRefused,
    ValkeyUnreachable,
    evalsha,
    is_unknown_script,
)
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import Answer, ClaimReply, Event, WorkerEventKind, encode
from worker_runtime.protocol.scripts import ANSWER
from worker_runtime.protocol.switches import HALTED, switch_of

#: Entries. Without Valkey no order is taken, so only late fills gather here; each has about 400 bytes.
MAX_ENTRIES = 10_000
#: Seconds a journal entry stays: whoever asks whether an order may have been submitted asks within a day.
JOURNAL_TTL = 2 * 86_400
#: Commands in one go.
_BATCH = 64


class SendBuffer:
    """Sends what was put into it. Not for use by several threads."""

    def __init__(self, client: Valkey, config: WorkerConfig, shared_state: SharedState, log: Log) -> None:
        self._client = client
        self._config = config
        self._shared_state = shared_state
        self._log = log
        self._waiting: deque[Command] = deque()
        self._backoff = Backoff(0.05, 2.0)
        #: The last entry of `add_journal_entry` is in Valkey, and it is ours.
        self.journaled = False
        #: There may be more to pop. False, as the last answer said: the doorbell rings for whatever comes.
        self.more_to_pop = True
        #: What `read_switch` last read, and whether that was a copy from another server's time.
        self.switch = HALTED
        self.switch_is_stale = False

    def __len__(self) -> int:
        return len(self._waiting)

    def left(self) -> float | None:
        """Seconds until `flush` is due; None if there is nothing to send."""
        return self._backoff.left() if self._waiting else None

    def add_event(self, event: Event) -> None:
        self._put("XADD", keys.EVENTS, "*", "e", encode(event))

    def add_journal_entry(self, order_id: str) -> None:
        """Notes that an order is about to be submitted. Nothing may be submitted before `flush` has said true
        and `journaled` is: an order without an entry certainly never left, in the same generation, and one
        that has an entry of somebody else may have left before."""
        self.journaled = False
        key = keys.journal(self._shared_state.user_id, order_id)
        self._put("SET", key, str(wall_ms()), "NX", "GET", "EX", JOURNAL_TTL)

    def add_worker_event(self, kind: WorkerEventKind, detail: str = "") -> None:
        """A change in this worker's life, once it belongs to a user."""
        state = self._shared_state
        if state.assigned:
            self._log.info("worker_changed", kind=kind.value, detail=detail)
            sequence = state.next_session_event()
            self.add_event(new_worker_event(self._config, state, sequence, kind, detail))

    def add_answer(self, item: bytes, answer: Answer, channel: str) -> None:
        """The answer to a popped item, which ends its processing."""
        user_id = self._shared_state.user_id
        self.more_to_pop = True
        names = keys.answering(user_id, answer.request_id)
        self._put(*evalsha(ANSWER, names, [item, encode(answer), keys.ANSWER_TTL, channel]))

    def read_switch(self) -> None:
        """Reads who may trade, with whatever else is sent; `switch` has it once `flush` has said true."""
        self.switch, self.switch_is_stale = HALTED, False
        self._put("HGETALL", keys.switch(self._shared_state.user_id))

    def discard_item(self, item: bytes) -> None:
        """Ends the processing of an item that nobody can be answered about."""
        self.more_to_pop = True
        self._put("LREM", keys.processing(self._shared_state.user_id), 1, item)

    def send_claim_reply(self, reply: ClaimReply) -> None:
        key = keys.pool_reply(self._config.pool, reply.claim_id)
        self._put("RPUSH", key, encode(reply))
        self._put("EXPIRE", key, keys.CLAIM_TTL)
        self.flush()

    def flush(self, *, attempts: int = 2) -> bool:
        """Sends all that waits; true if nothing is left. A broken connection is replaced once, unless
        there is one attempt only."""
        for attempt in range(1, attempts + 1):
            try:
                while self._waiting:
                    self._send_batch()
            except ValkeyUnreachable as error:
                if attempt == attempts:
                    self._keep(error)
            except ValkeyRefused as error:
                self._keep(error)
                break
            else:
                self._backoff.reset()
                return True
        return False

    def flush_if_due(self) -> None:
        """One attempt, if the last failure is long enough ago."""
        if self._waiting and self._backoff.due():
            self.flush(attempts=1)

    def _put(self, *command: Argument) -> None:
        if len(self._waiting) >= MAX_ENTRIES:
            self._waiting.popleft()
            self._log.error("send_buffer_full", limit=MAX_ENTRIES)
        self._waiting.append(command)

    def _send_batch(self) -> None:
        batch = list(self._waiting)[:_BATCH]
        for command, reply in zip(batch, self._client.pipeline(batch), strict=True):
            if is_unknown_script(reply):
                reply = self._client.execute("EVAL", ANSWER.source, *command[2:])
            if isinstance(reply, hiredis.ReplyError):
                raise ValkeyRefused(str(reply).split(" ", 1)[0])
            if command[0] == "EVALSHA":
                self.more_to_pop = bool(reply[1])
            elif command[0] == "SET":  # answered with what stood there before; our own after a lost reply
                self.journaled = reply is None or reply == str(command[2]).encode()
            elif command[0] == "HGETALL":
                self.switch, self.switch_is_stale = switch_of(reply, self._client.server())
            self._waiting.popleft()

    def _keep(self, error: ValkeyFailed) -> None:
        self._log.warning("send_buffer_stuck", waiting=len(self._waiting), reason=error.detail)
        self._backoff.failed()
