"""The requests in a user's queue, and the switch (`trading:switch:{user}`) that says which orders may pass.

A request is framed as `deadline ms|request id|payload`, so that Lua can read the deadline. All go through one
FIFO, so that a cancel never overtakes its order. Quantities are lots, prices are decimal strings, times are
Unix milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any

import msgspec

from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.exchange import Balance as Balance
from worker_runtime.protocol.exchange import ExchangeOrder, Position
from worker_runtime.protocol.messages import PlaceOrder, RequestMessage


@dataclass(frozen=True, slots=True)
class Frame:
    """One item of a request queue. `raw` is what `answer.lua` and `withdraw.lua` look for."""

    raw: bytes
    deadline_ms: int
    request_id: str
    payload: bytes


def parse_frame(raw: bytes) -> Frame:
    """Splits an item into its parts. Raises `MalformedMessage` if it is no frame."""
    parts = raw.split(b"|", 2)
    # 15 digits of milliseconds reach the year 33658; `int` would raise ValueError for thousands of them.
    if len(parts) != 3 or not parts[0].isdigit() or len(parts[0]) > 15 or not parts[1].isascii():
        raise MalformedMessage("a queued item is not `deadline|request|payload`")
    return Frame(raw, int(parts[0]), parts[1].decode("ascii"), parts[2])


class ChangeMessage(RequestMessage, frozen=True, kw_only=True):
    """What a request carries that changes a working order."""

    order_id: str
    symbol: str
    tag: str
    broker_order_id: str | None


class CancelOrder(ChangeMessage, frozen=True, kw_only=True, tag="cancel_order"):
    """Cancels a working order. Passes every switch."""


class ReplaceOrder(ChangeMessage, frozen=True, kw_only=True, tag="replace_order"):
    """Changes a working order to a smaller quantity or another price. At most once, like a submission."""

    #: New total quantity, at least the filled one; None: unchanged. It can only fall (Shioaji, TAIFEX).
    quantity: int | None
    price: Decimal | None


class QueryAccount(RequestMessage, frozen=True, kw_only=True, tag="query_account"):
    """Asks what the broker knows of one account now. The answer carries an `AccountReport`."""

    orders: bool = True
    #: Only the orders with these tags; empty: all. A report has room for some hundreds.
    tags: tuple[str, ...] = ()
    positions: bool = False
    balance: bool = False


Request = PlaceOrder | CancelOrder | ReplaceOrder | QueryAccount


class AccountReport(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's view of an account, as one session saw it."""

    account_id: str
    taken_at_ms: int
    #: Whether the report has everything that was asked for.
    complete: bool
    #: Whether all orders that the broker took between `reaches_ms` and `behind_ms` before are certainly
    #: listed. False where a list may leave out any, such as those of earlier sessions (Shioaji's simulation,
    #: Sinotrade/Shioaji #218).
    absence_certain: bool
    behind_ms: int = 0
    #: None if the broker does not say.
    reaches_ms: int | None = None
    #: Whether the positions include the fills of all orders that are certainly listed.
    positions_agree: bool = False
    orders: list[ExchangeOrder] = []
    positions: list[Position] = []
    balance: Balance | None = None


def decode_report(report: dict[str, Any]) -> AccountReport:
    """Reads `Answer.report` or `AccountReported.report`; raises `msgspec.ValidationError`."""
    return msgspec.convert(report, AccountReport)


def encode_report(report: AccountReport) -> dict[str, Any]:
    """A report as it travels in a message."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    return found


# --- the switch -------------------------------------------------------------------------------------

#: Fields of the hash: for all of a user's accounts, for the version, for the server to which it was written.
#: The others are account ids, which begin with a letter or digit.
EVERY_ACCOUNT = "*"
SWITCH_VERSION = "*version"
SWITCH_SERVER = "*server"


class SwitchState(StrEnum):
    """Which orders are accepted: all, only those that make a position smaller, or none. Cancels always
    are."""

    OPEN = "open"
    REDUCING = "reducing"
    HALTED = "halted"


_STATES = {state.value.encode(): state for state in SwitchState}
_STRICTNESS = (SwitchState.OPEN, SwitchState.REDUCING, SwitchState.HALTED)


def strictest(*states: SwitchState) -> SwitchState:
    """The strictest of the states; open if there is none."""
    return max(states, key=_STRICTNESS.index, default=SwitchState.OPEN)


class UserSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that switches one user."""

    #: Version of the newest change in it; 0 if nobody ever switched.
    version: int = 0
    #: For all accounts.
    every: SwitchState = SwitchState.OPEN
    #: Accounts that have a state of their own which is not open.
    accounts: Mapping[str, SwitchState] = {}
    #: Run id of the Valkey server to which it was written; '' if none. Another server, promoted or restarted,
    #: may hold an older copy, so it is written anew.
    server: str = ""

    def of(self, account_id: str) -> SwitchState:
        """The state of one account."""
        return strictest(self.every, self.accounts.get(account_id, SwitchState.OPEN))

    def words(self) -> list[str | int]:
        """The arguments of `write_switch.lua`, and the last ones of `set_owner.lua`."""
        found: list[str | int] = [self.version, EVERY_ACCOUNT, self.every.value]
        if self.server:
            found += [SWITCH_SERVER, self.server]
        for account_id, state in sorted(self.accounts.items()):
            found += [account_id, state.value]
        return found


#: The switch of a user whom nobody ever switched.
OPEN_SWITCH = UserSwitch()
#: The meaning of a missing switch.
HALTED_SWITCH = UserSwitch(every=SwitchState.HALTED)


def switch_of(words: Sequence[bytes], server: str) -> tuple[UserSwitch, bool]:
    """The switch that HGETALL returned at the server with this run id, and whether it is stale.

    What is missing or makes no sense is halted. A stale switch was written to another server: it may be an
    older copy of the last one, so it is halted, too, until it is written to this server.
    """
    fields = {name.decode(): value for name, value in zip(words[::2], words[1::2], strict=True)}
    version, every = fields.pop(SWITCH_VERSION, b""), fields.pop(EVERY_ACCOUNT, b"")
    written_to = fields.pop(SWITCH_SERVER, b"").decode("utf-8", "replace")
    if written_to not in ("", server):
        return HALTED_SWITCH, True
    return UserSwitch(
        version=int(version) if version.isdigit() else 0,
        every=_STATES.get(every, SwitchState.HALTED),
        accounts={name: _STATES.get(value, SwitchState.HALTED) for name, value in fields.items()},
        server=written_to,
    ), False
