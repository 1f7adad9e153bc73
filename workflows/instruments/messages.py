"""Messages of the loads of instruments; the rules are those of `user_worker/messages.py`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class InstrumentsInput:
    """The input of a look at which brokers' instruments are due."""

    #: Seconds before a market takes orders at which its load begins.
    lead: float = 5400.0


@dataclass(frozen=True, kw_only=True)
class PlanInstruments:
    """Activity `plan_instruments`."""

    lead: float
    #: Unix seconds by Temporal's clock: what today is.
    at: float


@dataclass(frozen=True, kw_only=True)
class DueLoad:
    """A list of a trading day that is not in force yet, and whose load may begin."""

    broker: str
    #: Like `2026-11-23`, in the market's time zone.
    day: str
    #: Unix seconds of the end of that day: no attempt begins later.
    until: float
    #: That of the account that lists, since a broker may have one for each; '': its only one.
    market: str = ""
    #: Unix seconds from which on it was due: an earlier load does not count.
    since: float = 0.0


@dataclass(frozen=True, kw_only=True)
class InstrumentsPlan:
    loads: tuple[DueLoad, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InstrumentsResult:
    #: Brokers whose loads began now.
    begun: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InstrumentLoadInput:
    """The input of a load: the list of one trading day, tried until it is in force."""

    broker: str
    day: str
    until: float
    #: Seconds after the first failed attempt until the next one;
    #: then twice as many, at most `longest_retry`.
    retry: float = 60.0
    longest_retry: float = 900.0
    #: Attempts before this run.
    attempts: int = 0
    #: As in `DueLoad`.
    market: str = ""


@dataclass(frozen=True, kw_only=True)
class LoadNow:
    """Signal `load_now`: an operator wants an attempt at once."""

    #: A list that is much smaller than the one before is put in force, too.
    accept_smaller: bool = False


@dataclass(frozen=True, kw_only=True)
class LoadInstruments:
    """Activity `load_instruments`: one attempt."""

    broker: str
    day: str
    accept_smaller: bool = False
    #: As in `DueLoad`.
    market: str = ""


@dataclass(frozen=True, kw_only=True)
class LoadOutcome:
    """Says how an attempt ended; without `loaded` the list before stays in force."""

    loaded: bool
    #: Why not.
    code: str = ""
    detail: str = ""
    instruments: int = 0
    added: int = 0
    removed: int = 0
    #: Changed lots that wait for an operator.
    pending: int = 0


@dataclass(frozen=True, kw_only=True)
class InstrumentLoadResult:
    outcome: LoadOutcome
    attempts: int
    #: Unix seconds of the end.
    ended_at: float
