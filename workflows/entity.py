"""What several workflows share: reading signals, carried state, continue-as-new, and a run named by its day.

Anybody who reaches Temporal can send anything. A handler that raises fails its workflow's task again and
again, until somebody resets the workflow. So handlers take every payload, and drop with a log line what does
not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.converter import value_to_type
from temporalio.exceptions import ChildWorkflowError, WorkflowAlreadyStartedError

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


def known_fields(kind: type[Any], carried: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of dataclass `kind` in a carried state; those of another release are dropped."""
    return {name: value for name, value in (carried or {}).items() if name in kind.__dataclass_fields__}


def copied_fields(source: object, kind: type[Any]) -> dict[str, Any]:
    """The fields of dataclass `kind` that `source` has, too: a view of a state."""
    return {name: getattr(source, name) for name in kind.__dataclass_fields__ if hasattr(source, name)}


def continue_as_new(given: object) -> NoReturn:
    """Goes on in a new run on the current version; it would else be pinned to the old (docs/adr/0007)."""
    workflow.continue_as_new(
        given, initial_versioning_behavior=workflow.ContinueAsNewVersioningBehavior.AUTO_UPGRADE
    )


async def run_named_by_day(run: Any, given: object, *, id: str, begun: T, summary: str) -> T:
    """Does the work in a child named by its day; returns `begun` if that one runs or ran already."""
    try:
        result: T = await workflow.execute_child_workflow(
            run,
            given,
            id=id,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
            # Whoever ends the parent, which the Schedule started, does not end the day's work.
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            static_summary=summary,
        )
        return result
    except WorkflowAlreadyStartedError:
        return begun
    except ChildWorkflowError as error:
        if not isinstance(error.cause, WorkflowAlreadyStartedError):
            raise
        return begun
