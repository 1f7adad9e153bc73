"""The switch that says who may trade, as `trading:switch:{user}` holds it in Valkey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

#: The field for all of a user's accounts. An account id begins with a letter or digit.
EVERY_ACCOUNT = "*"
#: The field of the version.
VERSION = "*version"
#: The field of the server to which it was told.
SERVER = "*server"


class SwitchState(StrEnum):
    """Which orders are accepted: all, only those that make a position smaller, or none. Cancels always
    are."""

    OPEN = "open"
    REDUCING = "reducing"
    HALTED = "halted"


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
    #: Run id of the Valkey server to which it was told; '' if none. Another server, promoted or restarted,
    #: may hold an older copy and has to be told anew.
    server: str = ""

    def of(self, account_id: str) -> SwitchState:
        """The state of one account."""
        return strictest(self.every, self.accounts.get(account_id, SwitchState.OPEN))

    def words(self) -> list[str | int]:
        """The arguments of `write_switch.lua`, and the last ones of `set_owner.lua`."""
        found: list[str | int] = [self.version, EVERY_ACCOUNT, self.every.value]
        if self.server:
            found += [SERVER, self.server]
        for account_id, state in sorted(self.accounts.items()):
            found += [account_id, state.value]
        return found


#: The switch of a user whom nobody ever switched.
OPEN = UserSwitch()
#: The meaning of a missing switch.
HALTED = UserSwitch(every=SwitchState.HALTED)


def switch_of(words: Sequence[bytes], server: str) -> tuple[UserSwitch, bool]:
    """The switch that HGETALL returned at the server with this run id, and whether it is stale.

    What is missing or makes no sense is halted. A stale switch was told to another server: it may be an older
    copy of the last one, so it is halted, too, until this server is told.
    """
    fields = {name.decode(): value for name, value in zip(words[::2], words[1::2], strict=True)}
    version, every = fields.pop(VERSION, b""), _state(fields.pop(EVERY_ACCOUNT, b""))
    told_to = fields.pop(SERVER, b"").decode("utf-8", "replace")
    if told_to not in ("", server):
        return HALTED, True
    accounts = {account_id: _state(value) for account_id, value in fields.items()}
    known = int(version) if version.isdigit() else 0
    return UserSwitch(version=known, every=every, accounts=accounts, server=told_to), False


_STATES = {state.value.encode(): state for state in SwitchState}


def _state(value: bytes) -> SwitchState:
    return _STATES.get(value, SwitchState.HALTED)
