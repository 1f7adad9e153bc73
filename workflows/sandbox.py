"""Makes what runs an orchestrator's workflows: the sandbox, with our own plain modules passed
through.

Measured on 2 cores: update-with-start until Active 45 ms (p50) when each run imports all our
modules again, 25 ms when only the workflow's own file is imported again, 17 ms without a
sandbox. The suite runs them with none of our modules passed through, so what the sandbox
would refuse is seen there.
"""

import pkgutil
from collections.abc import Sequence
from typing import Any

from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

import workflows

#: Never a package: Temporal passes all modules below one, too, and with them the workflows.
_OWN_MODULES = tuple(
    module.name
    for module in pkgutil.walk_packages(workflows.__path__, "workflows.")
    if not module.ispkg and not module.name.endswith((".workflow", ".sandbox"))
)
PASSED_THROUGH = ("msgspec", "worker_runtime.protocol", *_OWN_MODULES)

#: Passed through though no workflow uses them: redis-py imports modules in the finalizer of a pool,
#: and the collector may run it on a workflow's thread. Were hiredis imported again there, its new
#: error class would take the place of the one that everybody else in the process compares with.
LIBRARIES = ("hiredis", "redis")


class QueryCameFirst(RuntimeError):
    """A query brought events for which no workflow task was started yet."""


class QueryGuard(SandboxedWorkflowRunner):
    """Refuses to run a workflow ahead of its next task because somebody asks how it is.

    When an orchestrator dies, a query may reach the next one together with events that wait for a
    task. The SDK (1.35) runs the workflow on with them, by the clock of the task before, and keeps
    the commands for the next task. A later replay sees that task's time: commands that depend on
    the time differ, and the workflow is stuck for good (TMPRL1100). Refused, the query fails, and
    the next task replays the run.
    """

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        instance = super().create_instance(det)
        activate, seen = instance.activate, (0, 0)

        def guarded(act: Any) -> Any:
            nonlocal seen
            events, size = act.history_length, act.history_size_bytes
            # Both come with a task's start: a history that grew,
            # and whose size is the former, has none.
            if not act.is_replaying and events > seen[0] and 0 < size == seen[1]:
                raise QueryCameFirst(
                    "a query came before the task of the events it brought: it is refused"
                )
            seen = events, size
            return activate(act)

        instance.activate = guarded  # type: ignore[method-assign]
        return instance


def workflow_runner(*, passed: Sequence[str] = PASSED_THROUGH) -> SandboxedWorkflowRunner:
    """Returns the runner of sandboxed workflows. `passed` names our own modules that are passed
    through; the tests pass none."""
    allowed = SandboxRestrictions.default.with_passthrough_modules(*LIBRARIES, *passed)
    return QueryGuard(restrictions=allowed)
