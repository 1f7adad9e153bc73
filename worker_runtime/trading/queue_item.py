"""A request or control message as it came out of the queue, with its deadline and the switch."""

from dataclasses import dataclass

from worker_runtime.process.clock import seconds_until
from worker_runtime.protocol.requests import HALTED_SWITCH, UserSwitch


@dataclass(frozen=True, slots=True)
class QueueItem:
    """Holds what `pop.lua` returned. `kind`: control, request, empty, stale, fenced or no_owner."""

    kind: str
    raw: bytes
    #: CLOCK_MONOTONIC ns after which a request must not be executed any more.
    deadline_ns: int
    #: Generation of Valkey, as the owner key holds it.
    generation: str
    #: Says who may trade, at the time of the pop; halted if the switch is missing.
    switch: UserSwitch = HALTED_SWITCH
    #: The switch is a copy that was written to another server: it says nothing, and the request has
    #: to wait.
    switch_is_stale: bool = False
    #: CLOCK_MONOTONIC ns since which Valkey's server is known; 0 if nobody has noted it. What was
    #: queued before may be a copy of another server's data.
    server_since_ns: int = 0

    def seconds_left(self) -> float:
        """Returns the seconds until the deadline; negative when it has passed."""
        return seconds_until(self.deadline_ns)
