"""Keeps the session's events and answers, in order, until Valkey has taken them: 10,000 at most,
the oldest are dropped first.

Everything may be sent twice: events are recognised by their ids, and `answer.lua` is safe to
repeat. So a lost reply never loses an answer.
"""

from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

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
    raise_if_error,
)
from worker_runtime.protocol import keys
from worker_runtime.protocol.answers import sign_answer, worker_author
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import (
    AccountLogin,
    Answer,
    ClaimReply,
    Event,
    WorkerEventKind,
)
from worker_runtime.protocol.requests import HALTED_SWITCH
from worker_runtime.protocol.scripts import ANSWER
from worker_runtime.protocol.sealing import prove_reply
from worker_runtime.protocol.worker_reports import sign_event
from worker_runtime.trading.switch_reader import SwitchReader

#: Without Valkey no order is popped, so only late fills gather here, of about 400 bytes each.
MAX_WAITING_COMMANDS = 10_000
#: Seconds a journal entry is kept. It is needed for a day, to know whether an order may have been
#: submitted.
JOURNAL_TTL_S = 2 * 86_400
#: Commands in one pipeline.
_MAX_COMMANDS_PER_PIPELINE = 64


class SendBuffer:
    """Buffers commands for Valkey and sends them. Not for use by several threads."""

    def __init__(
        self, client: Valkey, config: WorkerConfig, shared_state: SharedState, log: Log
    ) -> None:
        self._client = client
        self._config = config
        self._shared_state = shared_state
        self._log = log
        self._switches = SwitchReader(shared_state, log)
        self._waiting: deque[Command] = deque()
        self._backoff = Backoff(0.05, 2.0)
        #: True if the last journal entry is in Valkey and was written by this session.
        self.journaled = False
        #: False if the last answer emptied the queue; the doorbell rings for the next item.
        self.more_to_pop = True
        #: The switch that `read_switch` last read, and whether that was written to another server.
        self.switch = HALTED_SWITCH
        self.switch_is_stale = False

    def __len__(self) -> int:
        return len(self._waiting)

    def seconds_until_due(self) -> float | None:
        """Returns the seconds until `flush` is due; None if there is nothing to send."""
        return self._backoff.seconds_until_due() if self._waiting else None

    def add_event(self, event: Event) -> None:
        entry = sign_event(event, self._shared_state.message_keys().assignment)
        worker_id = self._config.worker_id
        bell = ("RPUSH", keys.EVENT_BELL, worker_id)
        if self._waiting and self._waiting[-1] == bell:  # one ring is enough for both
            self._waiting.pop()
        self._put("RPUSH", keys.events_of(worker_id), entry)
        self._put(*bell)

    def add_journal_entry(self, order_id: str) -> None:
        """Notes that an order is about to be submitted. Submit it only when `flush` has returned
        true and `journaled` is set.

        Within one generation, no entry means never sent; another session's entry means maybe
        sent."""
        self.journaled = False
        key = keys.journal(self._shared_state.user_id, order_id)
        self._put("SET", key, str(wall_ms()), "NX", "GET", "EX", JOURNAL_TTL_S)

    def add_worker_event(
        self, kind: WorkerEventKind, detail: str = "", logins: Sequence[AccountLogin] = ()
    ) -> None:
        """Adds an event about this worker, unless it has no user yet."""
        state = self._shared_state
        if state.assigned:
            self._log.info("worker_changed", kind=kind.value, detail=detail)
            sequence = state.next_session_event()
            event = new_worker_event(self._config, state, sequence, kind, detail)
            self.add_event(replace(event, logins=list(logins)))

    def add_answer(self, item: bytes, answer: Answer, channel: str) -> None:
        """Adds the answer to a popped item, which ends its processing."""
        user_id = self._shared_state.user_id
        self.more_to_pop = True
        names = keys.answering(user_id, answer.request_id)
        author = worker_author(self._shared_state.epoch, self._config.worker_id)
        signed = sign_answer(self._shared_state.message_keys().assignment, user_id, author, answer)
        self._put(*evalsha(ANSWER, names, [item, signed, keys.ANSWER_TTL_S, channel]))

    def read_switch(self) -> None:
        """Reads who may trade, together with the next flush; `switch` has it when `flush` has
        returned true."""
        self.switch, self.switch_is_stale = HALTED_SWITCH, False
        self._put("HGETALL", keys.switch(self._shared_state.user_id))

    def discard_item(self, item: bytes) -> None:
        """Ends the processing of an item without an answer."""
        self.more_to_pop = True
        self._put("LREM", keys.processing(self._shared_state.user_id), 1, item)

    def send_claim_reply(self, reply: ClaimReply) -> None:
        key = keys.pool_reply(self._config.pool, self._config.worker_id, reply.claim_id)
        self._put("RPUSH", key, prove_reply(reply, self._config.launch_token))
        self._put("EXPIRE", key, keys.CLAIM_TTL_S)
        self.flush()

    def flush(self, *, attempts: int = 2) -> bool:
        """Sends everything; returns whether nothing is left.

        Tries `attempts` times over broken connections.
        """
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
        """Tries to flush once, unless the pause after the last failure is not over."""
        if self._waiting and self._backoff.due():
            self.flush(attempts=1)

    def _put(self, *command: Argument) -> None:
        if len(self._waiting) >= MAX_WAITING_COMMANDS:
            self._waiting.popleft()
            self._log.error("send_buffer_full", limit=MAX_WAITING_COMMANDS)
        self._waiting.append(command)

    def _send_batch(self) -> None:
        batch = list(self._waiting)[:_MAX_COMMANDS_PER_PIPELINE]
        for command, reply in zip(batch, self._client.pipeline(batch), strict=True):
            if is_unknown_script(reply):
                reply = self._client.execute("EVAL", ANSWER.source, *command[2:])
            raise_if_error(reply)
            if command[0] == "EVALSHA":
                self.more_to_pop = bool(reply[1])
            elif command[0] == "SET":
                # The reply is the earlier entry: our own, if the first reply was lost.
                self.journaled = reply is None or reply == str(command[2]).encode()
            elif command[0] == "HGETALL":
                self.switch, self.switch_is_stale = self._switches.read(
                    reply, self._client.server()
                )
            self._waiting.popleft()

    def _keep(self, error: ValkeyFailed) -> None:
        self._log.warning("send_buffer_stuck", waiting=len(self._waiting), reason=error.detail)
        self._backoff.failed()
