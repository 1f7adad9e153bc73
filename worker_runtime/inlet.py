"""Takes the user's work out of Valkey with `pop.lua`, one piece at a time.

Every pop has a number. A pop whose reply was lost is repeated with the same number, and the server then
returns the same piece: no order is lost between the queue and the session. A pop older than the last one
takes nothing, so one that a broken connection delivers late loses none either.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from worker_runtime.board import Board
from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import POP
from worker_runtime.valkey import Valkey

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Piece:
    """What `pop.lua` returned. `kind`: control, request, empty, stale, fenced or no_owner."""

    kind: str
    item: bytes
    #: CLOCK_MONOTONIC ns after which a request must not be executed any more.
    deadline_ns: int
    #: Generation of Valkey, as the owner key holds it.
    generation: str


class Inlet:
    """One session's pops for one user."""

    def __init__(self, client: Valkey, board: Board, worker_id: str) -> None:
        self._client = client
        self._board = board
        self._worker_id = worker_id
        self._session = f"{worker_id}:{board.session_number}"
        self._answered = True

    def pop(self) -> Piece:
        """The next piece of work. Raises `ValkeyFailed`; then call again, for the same piece."""
        board = self._board
        if self._answered:
            board.pop_number += 1
            self._answered = False
        user_id = board.user_id
        # The remaining time is counted from before the question: the network's share goes against it.
        asked = time.monotonic_ns()
        kind, item, remaining_ms, generation = self._client.run(
            POP,
            [
                keys.owner(user_id),
                keys.control(user_id),
                keys.requests(user_id),
                keys.processing(user_id),
                keys.pop(user_id),
            ],
            [board.epoch, self._worker_id, self._session, board.pop_number],
        )
        self._answered = True
        return Piece(kind.decode(), item, asked + remaining_ms * _MILLION, generation.decode())

    def left_behind(self) -> list[bytes]:
        """Items that a former worker of this user popped and never answered."""
        items: list[bytes] = self._client.execute("LRANGE", keys.processing(self._board.user_id), 0, -1)
        return items
