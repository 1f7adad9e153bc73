"""The named points at which the exchange misbehaves on purpose.

A fault is one member here and one `strikes(…)` at the place in `exchange.py` or `link.py` where it happens.
Faults combine: `lost_ack` with `lost_event` leaves the client without any word of an order that was taken.
"""

from __future__ import annotations

from enum import StrEnum


class FaultPoint(StrEnum):
    #: The connection breaks when an order arrives; the order is not taken.
    LOST_REQUEST = "lost_request"
    #: The order is taken; its answer is never sent.
    LOST_ACK = "lost_ack"
    #: The order is taken; its answer comes `late_ack_ms` later, after its fills.
    LATE_ACK = "late_ack"
    #: The order is taken; then the connection breaks, before the answer.
    DROP_BEFORE_ACK = "drop_before_ack"
    #: A cancel or replacement does not arrive: nothing happens, and it is never answered.
    LOST_CHANGE = "lost_change"
    #: A cancel or replacement is done; its answer is never sent.
    LOST_CHANGE_ACK = "lost_change_ack"
    #: A cancel or replacement is done; then the connection breaks, before the answer.
    DROP_IN_CHANGE = "drop_in_change"
    #: A question for orders, positions or money is never answered.
    LOST_QUERY = "lost_query"
    #: The connection breaks at a question for orders, positions or money.
    DROP_IN_QUERY = "drop_in_query"
    #: Each fill is reported twice: another event, the same fill id.
    DUPLICATE_FILL = "duplicate_fill"
    #: Events about an order are never sent.
    LOST_EVENT = "lost_event"
    #: An event comes `late_event_ms` later: others overtake it.
    LATE_EVENT = "late_event"
    #: All events of the account are lost for `event_gap_ms`; then they go on.
    EVENT_GAP = "event_gap"
    #: Pings are not answered: the session looks alive and is not.
    LOST_PONG = "lost_pong"
    #: A login is neither answered nor refused.
    LOST_LOGIN = "lost_login"
