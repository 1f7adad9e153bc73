"""Reads a user's switch, which says whether trading is open, reduced or halted."""

from collections.abc import Sequence

from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol.authentication import RefusalCounter
from worker_runtime.protocol.requests import HALTED_SWITCH, UserSwitch, switch_of


class SwitchReader:
    """Reads the user's switch as Valkey returns it; refuses one older than the newest seen."""

    def __init__(self, shared_state: SharedState, log: Log) -> None:
        self._shared_state = shared_state
        self._log = log
        self._refused = RefusalCounter()
        #: The fields that were read last, under which keys, and what they mean: they rarely change.
        self._last: tuple[tuple[Sequence[bytes], str, int], tuple[UserSwitch, bool]] | None = None

    def read(self, fields: Sequence[bytes], server: str) -> tuple[UserSwitch, bool]:
        """Returns the switch, and whether it is stale (`switch_of`).

        A missing, forged or older one is halted.
        """
        shared_state = self._shared_state
        source = fields, server, shared_state.message_keys_written
        if self._last is not None and self._last[0] == source:
            meaning = self._last[1]
        else:
            request_keys = shared_state.message_keys().request
            meaning = switch_of(fields, server, request_keys, shared_state.user_id)
            self._last = source, meaning
        switch, stale = meaning
        if stale or switch is HALTED_SWITCH:
            if fields and not stale:
                self._refuse("forged")
            return meaning
        if switch.version < shared_state.switch_version:
            self._refuse("older than one before it")
            return HALTED_SWITCH, False
        shared_state.switch_version = switch.version
        return meaning

    def _refuse(self, reason: str) -> None:
        if self._refused.add(reason):
            self._log.error("switch_refused", reason=reason, count=self._refused.count)
