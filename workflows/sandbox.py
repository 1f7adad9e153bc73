"""How an orchestrator runs our workflows: in the sandbox, with our own plain modules passed through.

Measured on 2 cores: update-with-start until Active 45 ms (p50) when each run imports all our modules
again, 25 ms when only the workflow's own file is imported again, 17 ms without a sandbox. The suite runs
them with nothing passed through, so what the sandbox would refuse is seen there.
"""

from __future__ import annotations

from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

PASSED_THROUGH = (
    "msgspec",
    "worker_runtime.protocol",
    "workflows.calls",
    "workflows.messages",
    "workflows.names",
    "workflows.user_worker_display",
    "workflows.user_worker_life",
    "workflows.user_worker_start",
    "workflows.user_worker_state",
)


def workflow_runner() -> SandboxedWorkflowRunner:
    return SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_passthrough_modules(*PASSED_THROUGH)
    )
