"""Who may trade, as it stands on a user's slot in Valkey (`trading:switch:{user}`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache

import msgspec

#: The field that holds for all of a user's accounts. An account id begins with a letter or digit.
EVERY_ACCOUNT = "*"
#: The field of the version.
VERSION = "*version"
#: The field of the server to which it was told.
SERVER = "*server"


class SwitchState(StrEnum):
    """What is taken: all, only orders that make a position smaller, or none. Cancels always pass."""

    OPEN = "open"
    REDUCING = "reducing"
    HALTED = "halted"


_STRICTNESS = (SwitchState.OPEN, SwitchState.REDUCING, SwitchState.HALTED)


def strictest(*states: SwitchState) -> SwitchState:
    """The one that counts where several hold; open where none does."""
    return max(states, key=_STRICTNESS.index, default=SwitchState.OPEN)


class UserSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that switches one user."""

    #: Of the newest change that is in it; 0 if nobody ever switched.
    version: int = 0
    #: For all accounts.
    every: SwitchState = SwitchState.OPEN
    #: Accounts that have a state of their own which is not open.
    accounts: Mapping[str, SwitchState] = {}
    #: Run id of the Valkey to which it was told; empty: not told, as by earlier releases. Another server (one
    #: that was promoted or restarted) may hold an older copy than the last one, and has to be told anew.
    server: str = ""

    def holds_at(self, server: str) -> bool:
        """Whether it is more than a copy at the server with this run id."""
        return self.server in ("", server)

    def of(self, account_id: str) -> SwitchState:
        """What counts for one account."""
        return strictest(self.every, self.accounts.get(account_id, SwitchState.OPEN))

    def words(self) -> list[str | int]:
        """The arguments of `switch.lua`, and the last ones of `own.lua`."""
        found: list[str | int] = [self.version, EVERY_ACCOUNT, self.every.value]
        if self.server:
            found += [SERVER, self.server]
        for account_id, state in sorted(self.accounts.items()):
            found += [account_id, state.value]
        return found


#: Nobody ever switched.
OPEN = UserSwitch()
#: What a missing switch means.
HALTED = UserSwitch(every=SwitchState.HALTED)


def switch_of(words: Sequence[bytes]) -> UserSwitch:
    """The switch that Valkey holds, from HGETALL; what is missing, or makes no sense, is halted."""
    return _switch_of(tuple(words))


@lru_cache(maxsize=8)  # read twice an order, and seldom another one
def _switch_of(words: tuple[bytes, ...]) -> UserSwitch:
    fields = {name.decode(): value for name, value in zip(words[::2], words[1::2], strict=True)}
    version, every = fields.pop(VERSION, b""), _state(fields.pop(EVERY_ACCOUNT, b""))
    server = fields.pop(SERVER, b"").decode("utf-8", "replace")
    accounts = {account_id: _state(value) for account_id, value in fields.items()}
    known = int(version) if version.isdigit() else 0
    return UserSwitch(version=known, every=every, accounts=accounts, server=server)


_STATES = {state.value.encode(): state for state in SwitchState}


def _state(value: bytes) -> SwitchState:
    return _STATES.get(value, SwitchState.HALTED)
