"""The messages of maintenance; the rules are those of `user_worker/messages.py`."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class MaintenanceInput:
    """Input of `MaintenanceWorkflow` and of its activity `scan_fleet`."""

    #: Anomalies of one child workflow.
    batch: int = 100
    #: Children at the same time.
    abreast: int = 4
    #: A person has looked: the pass acts though much looks odd at once.
    override_guard: bool = False


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """Says what a scan found. The anomalies themselves stay in PostgreSQL."""

    #: Number of the pass; 0: it was skipped, because the one before is too recent to compare with.
    number: int
    workers: int = 0
    found: int = 0
    #: Anomalies that two passes have seen, and that may be cleaned up now.
    confirmed: int = 0
    #: Why nothing may be done; empty: it may.
    guarded: str = ""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Input of `MaintenanceBatchWorkflow` and of its activity
    `clean_up`: some anomalies of a pass."""

    number: int
    first: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """Outcome (`stopped`, `deleted`, `signalled`, `in_flight`, …) → how often."""

    outcomes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FinishPass:
    """Activity `finish_pass`: records the outcome of a pass."""

    number: int
    outcomes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Maintained:
    scanned: Scanned
    outcomes: dict[str, int]
