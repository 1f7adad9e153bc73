"""How an orchestrator runs our workflows: in the sandbox, with our own plain modules passed through.

Measured on 2 cores: update-with-start until Active 45 ms (p50) when each run imports all our modules
again, 25 ms when only the workflow's own file is imported again, 17 ms without a sandbox. The suite runs
them with none of our modules passed through, so what the sandbox would refuse is seen there.
"""

from __future__ import annotations

import pkgutil

from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

import workflows

#: Never a package: Temporal passes all modules below one, too, and with them the workflows.
_OWN = tuple(
    module.name
    for module in pkgutil.walk_packages(workflows.__path__, "workflows.")
    if not module.ispkg and not module.name.endswith((".workflow", ".sandbox"))
)
PASSED_THROUGH = ("msgspec", "worker_runtime.protocol", *_OWN)

#: Passed through though no workflow uses them: redis-py imports modules in the finalizer of a pool, and the
#: collector may run it on a workflow's thread. Were hiredis imported again there, its new error class would
#: take the place of the one that everybody else in the process compares with.
LIBRARIES = ("hiredis", "redis")


def workflow_runner() -> SandboxedWorkflowRunner:
    return _runner(*LIBRARIES, *PASSED_THROUGH)


def bare_runner() -> SandboxedWorkflowRunner:
    """With none of our own modules passed through: how the suite runs workflows."""
    return _runner(*LIBRARIES)


def _runner(*modules: str) -> SandboxedWorkflowRunner:
    return SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_passthrough_modules(*modules)
    )
