"""What a broker allows one person, and how much of it Berth uses (requirement C4)."""

from __future__ import annotations

import msgspec


class BrokerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """A broker's numbers, for one person id. The defaults are Shioaji's (its documentation, "limit").

    Exceeding them gets the person banned, and in the end the address, too. Connections are no such limit: one
    more is refused, and that is all.
    """

    connections: int = 5
    #: From midnight to midnight in Taipei.
    logins_per_day: int = 1000
    #: Place, replace and cancel; updates of status count as well.
    orders_per_10s: int = 250
    #: Lists of orders, positions, balance.
    queries_per_5s: int = 25


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker keeps the limits of its brokers."""

    #: The part of a broker's number that we use. The rest is for calls that arrive closer together than they
    #: left, and for the last second that a promoted replica of Valkey has lost.
    share: float = 0.9
    #: The address from which the broker sees this worker's calls; '': calls are counted by person only.
    egress: str = ""
    #: No broker tells its limit for an address. It may have the calls of so many persons.
    egress_persons: int = 10
    #: The paper exchange's limits: they can be set.
    paper: BrokerLimits = BrokerLimits()
