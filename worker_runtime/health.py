"""How the whole worker is, told once at each change, and shown in the metadata.

A user has one worker and perhaps several accounts. The workflow wants to know of the worker; which account it
was stands in the detail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import IntEnum

from worker_runtime.board import Board
from worker_runtime.connection import Connection
from worker_runtime.protocol import errors
from worker_runtime.protocol.messages import WorkerEventKind


class Condition(IntEnum):
    """Of all accounts together."""

    NEW = 0  # not yet connected, or a fresh session without credentials
    WELL = 1
    RECONNECTING = 2
    DEGRADED = 3


#: Codes by their number on the board; the first stands for all others.
_TROUBLES = (
    errors.BrokerError.code,
    errors.BrokerUnreachable.code,
    errors.LoginLimited.code,
    errors.LoginRejected.code,
    errors.LeaseLost.code,
    errors.SessionDown.code,
    errors.BrokerMaintenance.code,
    errors.RateLimited.code,
)
_NONE = -1


class Health:
    """Looks at all connections after each change of one, and tells what that means for the worker."""

    def __init__(self, board: Board, tell: Callable[[WorkerEventKind, str], None]) -> None:
        self._board = board
        self._tell = tell
        self._show(Condition.NEW)
        board.accounts = board.accounts_connected = 0

    def look(self, places: Collection[Connection], detail: str = "") -> None:
        """Tells the change that follows from how the connections stand. `detail` goes with CONNECTED."""
        missing = [place for place in places if place.broker is None]
        waiting = [place for place in missing if place.refused is None]
        unlisted = [place for place in places if place.broker is not None and not place.listed]
        self._board.accounts = len(places)
        self._board.accounts_connected = len(places) - len(missing)
        some = len(missing) < len(places)
        # Beside others that are well, one that never was (in this process) is tried again like one away.
        away = [place for place in waiting if place.away or (some and place.error and not place.was_open)]
        if away:
            code = away[0].error.code if away[0].error else ""
            self._degraded(f"{away[0].name}: {code}", code)
        elif waiting:
            self._reconnecting(f"{waiting[0].name}: {waiting[0].lost_because}")
        elif unlisted:
            self._degraded(f"{unlisted[0].name}: its orders cannot be listed", unlisted[0].listing_error)
        elif some:
            refused = ", ".join(place.name for place in missing)
            detail = f"without {refused}: {errors.LoginRejected.code}" if refused else detail
            self._well(detail, refused=bool(refused))

    def parked(self) -> None:
        """All broker sessions were closed, because the lease is about to end."""
        self._board.accounts_connected = 0
        code = errors.LeaseLost.code
        if self._condition is Condition.NEW:
            return
        self._degraded("the lease was not renewed in time", code)

    @property
    def _condition(self) -> Condition:
        return Condition(self._board.condition)

    def _well(self, detail: str, *, refused: bool) -> None:
        told = self._condition is Condition.WELL
        self._show(Condition.WELL, errors.LoginRejected.code if refused else "")
        if not told:
            self._tell(WorkerEventKind.CONNECTED, detail)

    def _reconnecting(self, detail: str) -> None:
        if self._condition is Condition.WELL:
            self._show(Condition.RECONNECTING)
            self._tell(WorkerEventKind.RECONNECTING, detail)

    def _degraded(self, detail: str, code: str) -> None:
        told = self._condition is Condition.DEGRADED
        self._show(Condition.DEGRADED, code)
        if not told:
            self._tell(WorkerEventKind.DEGRADED, detail)

    def _show(self, condition: Condition, code: str = "") -> None:
        self._board.trouble = _NONE if not code else _TROUBLES.index(code) if code in _TROUBLES else 0
        self._board.condition = condition


def text(board: Board) -> str:
    """For the metadata: `well`, `connecting`, `reconnecting` or `degraded: CODE`."""
    condition, trouble = Condition(board.condition), board.trouble
    if condition in (Condition.WELL, Condition.DEGRADED) and 0 <= trouble < len(_TROUBLES):
        return f"degraded: {_TROUBLES[trouble]}"
    if condition is Condition.NEW:
        return "waiting for credentials" if board.connected else "connecting"
    return condition.name.lower()
