"""Functions that several workflows share: reading signals, carried state, continue-as-new, and the
work of a day.

Anybody who reaches Temporal can send anything. A handler that raises fails its workflow's task
again and again, until somebody resets the workflow. So handlers take every payload, and drop with a
log line what does not fit.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.converter import value_to_type
from temporalio.exceptions import (
    ChildWorkflowError,
    FailureError,
    WorkflowAlreadyStartedError,
    is_cancelled_exception,
)

from workflows.morning.messages import MorningPlan
from workflows.reports.messages import StatementsPlan

T = TypeVar("T")


def read_payload(signal: str, payload: tuple[Any, ...], message_type: type[T]) -> T | None:
    """Returns the one message that `signal` carries. Logs and returns None if it is something
    else."""
    why = f"{len(payload)} values instead of one"
    if len(payload) == 1:
        try:
            message: T = value_to_type(message_type, payload[0])
            return message
        except (TypeError, ValueError, OverflowError) as error:
            why = str(error)[:200]
    _log_dropped(signal, why)
    return None


def is_empty_payload(signal: str, payload: tuple[Any, ...]) -> bool:
    """Returns True if the signal carries nothing, or `null`, as it should; logs it otherwise."""
    empty = payload in ((), (None,))
    if not empty:
        _log_dropped(signal, f"{len(payload)} values instead of none")
    return empty


def _log_dropped(signal: str, why: str) -> None:
    workflow.logger.warning("signal_dropped", extra={"signal": signal, "reason": why})


def carried_state(kind: type[T], carried: Mapping[str, Any] | None) -> T:
    """Makes the state of the run before from its plain dict. Drops fields of another release."""
    state: T = value_to_type(kind, carried or {})
    return state


def copied_fields(source: object, kind: type[Any]) -> dict[str, Any]:
    """Returns the fields of dataclass `kind` that `source` has, too. Used to make a view of a
    state."""
    return {
        name: getattr(source, name) for name in kind.__dataclass_fields__ if hasattr(source, name)
    }


async def wait_until(condition: Callable[[], bool], seconds: float | None, summary: str) -> bool:
    """Waits for the condition, at most `seconds` (None: without a limit). Returns False if the time
    is up first."""
    try:
        await workflow.wait_condition(condition, timeout=seconds, timeout_summary=summary)
    except TimeoutError:
        return False
    return True


def raise_cancellation(error: FailureError) -> None:
    """Raises `error` again if it is the cancellation of the run.

    Without this, a run that is cancelled while it waits for an activity would take the failed
    activity for an ordinary failure and continue.
    """
    if is_cancelled_exception(error) and workflow.patched("a cancellation ends the run"):
        raise error


def continue_as_new(given: object) -> NoReturn:
    """Continues in a new run on the current version. Without the option, the new run would be
    pinned to the version of this one (docs/adr/0007)."""
    workflow.continue_as_new(
        given, initial_versioning_behavior=workflow.ContinueAsNewVersioningBehavior.AUTO_UPGRADE
    )


async def delegate_day(
    run: Any,
    given: Any,
    plan: MorningPlan | StatementsPlan,
    result: Callable[..., T],
    *,
    id: str,
    begun: str,
    summary: str,
) -> T | None:
    """Has the work of a day done once, by a child workflow that is named after the day.

    Returns None if this run is that child: it has to do the work itself. Otherwise returns the
    child's result, or a result with a reason: `plan.reason` if there is nothing to do that day,
    `begun` if another run has begun it.
    """
    if plan.reason:
        workflow.set_current_details(f"### Nothing to do on {plan.day}\n\n{plan.reason}")
        return result(day=plan.day, reason=plan.reason, ended_at=workflow.time())
    if given.day:
        return None
    try:
        done: T = await workflow.execute_child_workflow(
            run,
            replace(given, day=plan.day),
            id=id,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
            # The Schedule started the parent. Ending the parent does not end the day's work.
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            static_summary=summary,
        )
    except (WorkflowAlreadyStartedError, ChildWorkflowError) as error:
        if not isinstance(error.__cause__ or error, WorkflowAlreadyStartedError):
            raise
        return result(day=plan.day, reason=begun, ended_at=workflow.time())
    return done
