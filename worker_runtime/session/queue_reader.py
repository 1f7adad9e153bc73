"""Pops the user's work from Valkey with `pop.lua`,
one item at a time, and puts back an order that must wait.

Every pop has a number. A pop whose reply was lost is repeated with the same number, and the server
returns the same item, so no order is lost between the queue and the session. A pop that a broken
connection delivers late has an older number and takes nothing.
"""

import time

from worker_runtime.process.clock import NS_PER_MS, seconds_until
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Valkey, ValkeyFailed
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import PlaceOrder
from worker_runtime.protocol.requests import HALTED_SWITCH, SWITCH_SERVER
from worker_runtime.protocol.scripts import POP, PUT_BACK
from worker_runtime.trading.broker_sessions import BrokerSessions
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.switch_reader import SwitchReader


class RequestQueueReader:
    def __init__(self, client: Valkey, shared_state: SharedState, worker_id: str, log: Log) -> None:
        self._switches = SwitchReader(shared_state, log)
        self._client = client
        self._shared_state = shared_state
        self._worker_id = worker_id
        self._session = f"{worker_id}:{shared_state.session_number}"
        self._answered = True
        #: Run id of the server to which the switch is known to have been written.
        self._current_server = ""
        self._since_ns = 0

    def is_switch_current(self) -> bool:
        """Returns True if the switch was written to the present server, or if Valkey has none (then
        `pop` reads it as halted). Otherwise it may be an older one, and requests stay in their
        queue until the watcher has written it again. Raises `ValkeyFailed`."""
        server = self._client.server()
        if server != self._current_server:
            written_to = self._client.execute(
                "HGET", keys.switch(self._shared_state.user_id), SWITCH_SERVER
            )
            if written_to and written_to.decode("utf-8", "replace") != server:
                return False
            self._since_ns = self._known_since(server)
            self._current_server = server
        return True

    def _known_since(self, server: str) -> int:
        """Returns since when this server is known, in CLOCK_MONOTONIC ns.

        Returns 0 if no server is noted, and now if another one is.
        """
        noted, at_ms = self._client.execute("HMGET", keys.SERVER_SINCE, "server", "at_ms")
        if noted is None:
            return 0
        if noted.decode("utf-8", "replace") != server or not (at_ms or b"").isdigit():
            return time.monotonic_ns()
        seconds, micros = self._client.execute("TIME")
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        return time.monotonic_ns() - (now_ms - int(at_ms)) * NS_PER_MS

    def pop(self, *, control_only: bool = False) -> QueueItem:
        """Pops the next control message or, unless `control_only`, the next request.

        Raises `ValkeyFailed`; then call again, for the same item.
        """
        shared_state = self._shared_state
        if self._answered:
            shared_state.pop_number += 1
            self._answered = False
        user_id = shared_state.user_id
        server = self._client.server()
        # The remaining time counts from before the pop was sent: the round trip is part of it.
        sent_at_ns = time.monotonic_ns()
        kind, raw, remaining_ms, generation, *switch = self._client.run(
            POP,
            [
                keys.owner(user_id),
                keys.control(user_id),
                keys.requests(user_id),
                keys.processing(user_id),
                keys.pop(user_id),
                keys.switch(user_id),
            ],
            [
                shared_state.epoch,
                self._worker_id,
                self._session,
                shared_state.pop_number,
                "control" if control_only else "",
            ],
        )
        self._answered = True
        current, stale = (
            self._switches.read(switch[0], server) if switch else (HALTED_SWITCH, False)
        )
        if stale:  # of a pop that was repeated at another server after its reply was lost
            self._current_server = ""
        return QueueItem(
            kind.decode(),
            raw,
            sent_at_ns + remaining_ms * NS_PER_MS,
            generation.decode(),
            current,
            stale,
            self._since_ns if server == self._current_server else sent_at_ns,
        )

    def put_back(self, item: bytes, order_id: str) -> str:
        """Puts the last popped item, on which no work has begun, back to its place in the
        queue. Returns what `put_back.lua` says: queued, gone or left. Raises
        `ValkeyFailed`; then call again."""
        shared_state = self._shared_state
        user_id = shared_state.user_id
        names = [
            keys.owner(user_id),
            keys.requests(user_id),
            keys.processing(user_id),
            keys.journal(user_id, order_id),
            keys.pop(user_id),
        ]
        caller = (shared_state.epoch, self._worker_id, self._session, shared_state.pop_number)
        result: bytes = self._client.run(PUT_BACK, names, [*caller, item])
        return result.decode()

    def read_leftovers(self) -> tuple[list[bytes], str, int]:
        """Returns the items that a former worker popped and never answered, the generation, as the
        owner key holds it, and Unix ms by Valkey's clock."""
        user_id = self._shared_state.user_id
        items: list[bytes] = self._client.execute("LRANGE", keys.processing(user_id), 0, -1)
        if not items:
            return [], "", 0
        generation = self._client.execute("HGET", keys.owner(user_id), "generation") or b""
        seconds, micros = self._client.execute("TIME")
        return (
            items,
            generation.decode("utf-8", "replace"),
            int(seconds) * 1000 + int(micros) // 1000,
        )


class PostponedOrder:
    """Holds back the user's first order while it waits for its broker;
    requests stay queued meanwhile.

    Nothing of the order was begun, so it is not refused. Until its deadline it stays in Valkey,
    ahead of all that came after it, where it can be cancelled, halted or taken by another worker,
    and the account's next session executes it. Control messages are served meanwhile.
    """

    def __init__(
        self, queue_reader: RequestQueueReader, broker_sessions: BrokerSessions, log: Log
    ) -> None:
        self._queue_reader = queue_reader
        self._broker_sessions = broker_sessions
        self._log = log
        self._account_id = ""
        self._deadline_ns: int | None = None
        #: The item that is still to be put back, and its order's id.
        self._item: tuple[bytes, str] | None = None

    @property
    def is_waiting(self) -> bool:
        return self._deadline_ns is not None

    def hold(self, order: PlaceOrder, item: QueueItem) -> None:
        """Postpones a popped order. Call `put_back` before the next pop."""
        self._account_id = order.account_id
        self._deadline_ns = item.deadline_ns
        self._item = item.raw, order.order_id

    def put_back(self) -> bytes | None:
        """Puts the held order, if there is one, back into its queue. Returns its raw item if it can
        only be answered. Raises `ValkeyFailed`; then call again."""
        if self._item is None:
            return None
        item, order_id = self._item
        result = self._queue_reader.put_back(item, order_id)
        self._item = None
        if result == "queued":
            return None
        self._log.warning("order_not_put_back", order_id=order_id, became=result)
        self._deadline_ns = None
        return item if result == "left" else None

    def take_expiry(self) -> bool:
        """Returns True once, when the wait is over.

        It is over when there is a session or will be none, when orders of another account come
        first, or when the deadline has passed.
        """
        if self._deadline_ns is None or self.remaining_s() > 0:
            return False
        self._deadline_ns = None
        return True

    def remaining_s(self) -> float:
        """Returns the seconds until the wait is over, if nothing changes."""
        broker_sessions = self._broker_sessions
        if self._deadline_ns is None:
            return 0.0
        account_id = self._account_id
        session = broker_sessions.find(account_id)
        if session is not None and session.ready:
            return 0.0
        compared_soon = session is not None and session.broker is not None and session.books_awaited
        if broker_sessions.has_other_session(account_id) and not compared_soon:
            return 0.0
        return max(0.0, seconds_until(self._deadline_ns))

    def close(self) -> None:
        """Puts the order back before the session ends."""
        try:
            self.put_back()
        except ValkeyFailed as error:
            self._log.warning("order_not_put_back", code=error.code)
