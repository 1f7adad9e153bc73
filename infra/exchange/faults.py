"""The named points at which the exchange misbehaves on purpose.

A fault is one member here and one `strikes(…)` at the place in `exchange.py` or `link.py` where it happens.
Faults combine: `lost_ack` with `lost_event` leaves the client without any word of an order that was taken.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class FaultPoint(StrEnum):
    #: The connection breaks when an order arrives; the order is not taken.
    LOST_REQUEST = "lost_request"
    #: The order is taken; its answer is never sent.
    LOST_ACK = "lost_ack"
    #: The order is taken; its answer comes `late_ack_ms` later, after its fills.
    LATE_ACK = "late_ack"
    #: The order is taken; then the connection breaks, before the answer.
    DROP_BEFORE_ACK = "drop_before_ack"
    #: Each fill is reported twice: another event, the same fill id.
    DUPLICATE_FILL = "duplicate_fill"
    #: Events about an order are never sent.
    LOST_EVENT = "lost_event"
    #: Pings are not answered: the session looks alive and is not.
    LOST_PONG = "lost_pong"
    #: A login is neither answered nor refused.
    LOST_LOGIN = "lost_login"


class Faults(Protocol):
    """What asks whether a fault strikes now; each yes uses up one of its times."""

    def strikes(self, account: str, point: FaultPoint) -> bool: ...
