"""Takes the user's work out of Valkey with `pop.lua`, one item at a time.

Every pop has a number. A pop whose reply was lost is repeated with the same number, and the server returns
the same item, so no order is lost between the queue and the session. A pop that a broken connection delivers
late has an older number and takes nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from worker_runtime.process.clock import NS_PER_MS, seconds_until
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Valkey
from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import POP, PUT_BACK
from worker_runtime.protocol.switches import HALTED, SERVER, UserSwitch, switch_of


@dataclass(frozen=True, slots=True)
class QueueItem:
    """What `pop.lua` returned. `kind`: control, request, empty, stale, fenced or no_owner."""

    kind: str
    raw: bytes
    #: CLOCK_MONOTONIC ns after which a request must not be executed any more.
    deadline_ns: int
    #: Generation of Valkey, as the owner key holds it.
    generation: str
    #: Who may trade, at the time of the pop; halted if the switch is missing.
    switch: UserSwitch = HALTED
    #: The switch is a copy that was told to another server: it says nothing, and the request has to wait.
    switch_is_stale: bool = False
    #: CLOCK_MONOTONIC ns since which Valkey's server is known; 0 if nobody has noted it. What was queued
    #: before may be a copy of another server's data.
    server_since_ns: int = 0

    def seconds_left(self) -> float:
        """Seconds until the deadline; negative when it has passed."""
        return seconds_until(self.deadline_ns)


class RequestQueueReader:
    """One session's pops for one user."""

    def __init__(self, client: Valkey, shared_state: SharedState, worker_id: str) -> None:
        self._client = client
        self._shared_state = shared_state
        self._worker_id = worker_id
        self._session = f"{worker_id}:{shared_state.session_number}"
        self._answered = True
        #: Run id of the server to which the switch is known to have been told.
        self._current_server = ""
        self._since_ns = 0

    def is_switch_current(self) -> bool:
        """Whether the switch was told to the server that answers now. If not, it may be an older one, and
        requests stay in their queue until the watcher has told it again. Raises `ValkeyFailed`."""
        server = self._client.server()
        if server != self._current_server:
            told_to = self._client.execute("HGET", keys.switch(self._shared_state.user_id), SERVER)
            if told_to and told_to.decode("utf-8", "replace") != server:
                return False
            self._since_ns = self._known_since(server)
            self._current_server = server
        return True

    def _known_since(self, server: str) -> int:
        """CLOCK_MONOTONIC ns since which this server is known; now if only another one was noted."""
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
        # The remaining time counts from before the pop was sent, so that the round trip is part of it.
        asked = time.monotonic_ns()
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
                *(shared_state.epoch, self._worker_id, self._session, shared_state.pop_number),
                "control" if control_only else "",
            ],
        )
        self._answered = True
        current, stale = switch_of(switch[0], server) if switch else (HALTED, False)
        if stale:  # of a pop that was repeated at another server after its reply was lost
            self._current_server = ""
        return QueueItem(
            kind.decode(),
            raw,
            asked + remaining_ms * NS_PER_MS,
            generation.decode(),
            current,
            stale,
            self._since_ns if server == self._current_server else asked,
        )

    def put_back(self, item: bytes, order_id: str) -> str:
        """Puts the item of the last pop, which nobody has begun, back to its place in the queue. Returns what
        `put_back.lua` says: queued, gone or left. Raises `ValkeyFailed`; then call again."""
        shared_state = self._shared_state
        user_id = shared_state.user_id
        names = [
            *(keys.owner(user_id), keys.requests(user_id), keys.processing(user_id)),
            *(keys.journal(user_id, order_id), keys.pop(user_id)),
        ]
        caller = (shared_state.epoch, self._worker_id, self._session, shared_state.pop_number)
        became: bytes = self._client.run(PUT_BACK, names, [*caller, item])
        return became.decode()

    def read_leftovers(self) -> list[bytes]:
        """Items that a former worker of this user popped and never answered."""
        items: list[bytes] = self._client.execute(
            "LRANGE", keys.processing(self._shared_state.user_id), 0, -1
        )
        return items
