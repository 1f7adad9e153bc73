"""Messages of the daily statements and the daily report; the rules are those of
`user_worker/messages.py`."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StatementsInput:
    """The input of a day: each user with an address is sent a statement."""

    #: Like `2026-11-23`; empty: the last day of the home zone whose orders have ended. Then
    #: the work is done by a child named by the day.
    day: str = ""
    #: Users a second, in the long run.
    rate: float = 5.0
    #: Users of one page.
    page: int = 100
    #: Pages of one run, before it continues as new: 16 events each.
    pages: int = 100
    #: Set by continue-as-new only: `StatementsProgress` as a plain dict.
    carried: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class PlanStatements:
    #: Empty: the last one that has ended.
    day: str
    #: Unix seconds by Temporal's clock; 0 (before 0.2): our own clock.
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StatementsPlan:
    day: str
    #: Why there is nothing to do for this day; empty: there is.
    reason: str = ""
    #: Users with an address.
    users: int = 0


@dataclass(frozen=True, kw_only=True)
class EnqueueStatements:
    """Activity `enqueue_statements`: the next users in order of their ids, spread by the rate."""

    day: str
    after: str
    limit: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class StatementCounts:
    users: int = 0
    #: Jobs that were put on their queues, and those that were there before.
    enqueued: int = 0
    known: int = 0
    #: Users with more orders than one job can carry; their message only says so.
    too_many: int = 0
    #: Jobs that no runner would take, because of the address.
    refused: int = 0


@dataclass(frozen=True, kw_only=True)
class StatementsPage(StatementCounts):
    """Without users: there are no more."""

    #: The last user.
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class StatementsResult(StatementCounts):
    day: str
    #: Why nothing was done; empty: it was.
    reason: str = ""
    #: Unix seconds of the end.
    ended_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DailyReportInput:
    #: Empty: the last trading day that has ended, if today is one, too.
    day: str = ""


@dataclass(frozen=True, kw_only=True)
class MakeReport(DailyReportInput):
    #: When the workflow began, in Unix seconds: a repeat after midnight is about the same day.
    at: float


@dataclass(frozen=True, kw_only=True)
class ReportResult:
    day: str
    #: Why nothing was done; empty: it was.
    reason: str = ""
    #: Mails that were put on their queue.
    mails: int = 0
