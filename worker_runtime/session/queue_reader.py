"""Takes the user's work out of Valkey with `pop.lua`, one item at a time.

Every pop has a number. A pop whose reply was lost is repeated with the same number, and the server then
returns the same item: no order is lost between the queue and the session. A pop older than the last one
takes nothing, so one that a broken connection delivers late loses none either.
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
    #: Who may trade, as it stood when a request was popped; a switch that is missing says halted.
    switch: UserSwitch = HALTED
    #: The switch is a copy from another server's time: it says nothing, and so the request is to wait.
    switch_is_stale: bool = False
    #: CLOCK_MONOTONIC ns since which Valkey's server is known: what was queued before may be a copy out of
    #: another server's time. 0 if nobody has noted it.
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
        #: The server whose switch this is known to be.
        self._current_server = ""
        self._since_ns = 0

    def is_switch_current(self) -> bool:
        """Whether the switch was told to the very server that answers now. If not, it may be older than the
        last one, and requests are to be left in their queue until the watcher has told it anew.

        Raises `ValkeyFailed`.
        """
        server = self._client.server()
        if server != self._current_server:
            told = self._client.execute("HGET", keys.switch(self._shared_state.user_id), SERVER)
            if told and told.decode("utf-8", "replace") != server:
                return False
            self._since_ns = self._known_since(server)
            self._current_server = server
        return True

    def _known_since(self, server: str) -> int:
        """Since when this server is known, on CLOCK_MONOTONIC; now if all that is noted is of another one."""
        noted, at_ms = self._client.execute("HMGET", keys.SERVER_SINCE, "server", "at_ms")
        if noted is None:
            return 0
        if noted.decode("utf-8", "replace") != server or not (at_ms or b"").isdigit():
            return time.monotonic_ns()
        seconds, micros = self._client.execute("TIME")
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        return time.monotonic_ns() - (now_ms - int(at_ms)) * NS_PER_MS

    def pop(self, *, control_only: bool = False) -> QueueItem:
        """The next item of work, or the next control message with the requests left where they are.

        Raises `ValkeyFailed`; then call again, for the same item.
        """
        shared_state = self._shared_state
        if self._answered:
            shared_state.pop_number += 1
            self._answered = False
        user_id = shared_state.user_id
        server = self._client.server()
        # The remaining time is counted from before the question: the network's share goes against it.
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
        """Returns what the last pop gave, and nobody has begun, to its place in the queue. What became of it,
        in the words of `put_back.lua`: queued, gone or left. Raises `ValkeyFailed`; then call again."""
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
