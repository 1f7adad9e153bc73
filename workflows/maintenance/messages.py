"""What goes into and out of maintenance's workflows and activities; the rules are those of `messages.py`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class MaintenanceInput:
    """One pass over all workers."""

    #: Anomalies that one child workflow takes on.
    batch: int = 100
    #: Children at the same time.
    abreast: int = 4


@dataclass(frozen=True, kw_only=True)
class ScanFleet:
    """Activity `scan_fleet`."""


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """What one look at all workers found. The anomalies themselves stay in PostgreSQL."""

    #: Number of the pass; 0: it was not written down, since the one before is too fresh to compare with.
    number: int
    #: Workers that were looked at.
    workers: int = 0
    found: int = 0
    #: Anomalies that two passes have seen, and that may be cleaned up now.
    confirmed: int = 0
    #: Why nothing may be done; empty: it may.
    guarded: str = ""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Input of `MaintenanceBatchWorkflow` and of its activity `clean_up`: some anomalies of a pass."""

    number: int
    first: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """What was done with them → how often (`stopped`, `deleted`, `signalled`, `in_flight`, …)."""

    outcomes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FinishPass:
    """Activity `finish_pass`: writes down what came of a pass."""

    number: int
    outcomes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Maintained:
    """Result of one pass."""

    scanned: Scanned
    outcomes: dict[str, int]
