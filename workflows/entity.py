"""What a signal carries, read with care: anybody who reaches Temporal can send anything.

A handler that raises fails its workflow's task again and again, until somebody resets the workflow. So
handlers take whatever comes, and what does not fit is dropped with a line in the log.
"""

from __future__ import annotations

from typing import Any, TypeVar

from temporalio import workflow
from temporalio.converter import value_to_type

T = TypeVar("T")


def read_payload(signal: str, payload: tuple[Any, ...], wanted: type[T]) -> T | None:
    """The one message that `signal` carries; None, and logged, when it is something else."""
    why = f"{len(payload)} values instead of one"
    if len(payload) == 1:
        try:
            message: T = value_to_type(wanted, payload[0])
            return message
        except (TypeError, ValueError, OverflowError) as error:
            why = str(error)[:200]
    _log_dropped(signal, why)
    return None


def is_empty_payload(signal: str, payload: tuple[Any, ...]) -> bool:
    """Whether the signal carries nothing, or `null`, as it should; else it is logged."""
    empty = payload in ((), (None,))
    if not empty:
        _log_dropped(signal, f"{len(payload)} values instead of none")
    return empty


def _log_dropped(signal: str, why: str) -> None:
    workflow.logger.warning("signal_dropped", extra={"signal": signal, "reason": why})
