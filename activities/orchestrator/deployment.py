"""Temporal's worker deployment `berth`: its versions, which one is current, and what runs on which.

A version is a build id. New runs start on the current one; a pinned run stays on its own until it
continues as new. What the server does was tried on 1.32; docs/adr/0007 has the facts.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from google.protobuf.field_mask_pb2 import FieldMask
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.deployment.v1 import WorkerDeploymentVersion as VersionName
from temporalio.api.enums import v1 as enums
from temporalio.api.workflow.v1 import VersioningOverride, WorkflowExecutionOptions
from temporalio.api.workflowservice import v1 as api
from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.common import SearchAttributeKey, VersioningBehavior, WorkerDeploymentVersion
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import WorkerDeploymentConfig

from infra.temporal.client import RPC_TIMEOUT, signal_workflow, unless_missing
from workflows import names

#: Workflows that live for long and know the signal `renew`.
ENTITIES = (names.USER_WORKER, names.WORKER_POOL, names.ORDER, names.ROLLOUT)

#: Seconds for a query: an orchestrator answers in 5 ms, but its host may stand still for 3 s.
#: Without an orchestrator the server waits to the end.
_QUERY_TIMEOUT_S = 4.0
#: A query that the SDK answers for every workflow.
_ANY_WORKFLOW_KNOWS = "__temporal_workflow_metadata"
#: The tasks for which a worker with workflows polls each of its queues.
_KINDS = (
    enums.TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
    enums.TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
)
#: Workflows asked before a version counts as served by nobody.
_MAX_WORKFLOWS_ASKED = 3

_VERSION = SearchAttributeKey.for_keyword("TemporalWorkerDeploymentVersion")


@dataclass(frozen=True)
class DeploymentSnapshot:
    #: Build id of the current version; empty: none.
    current: str
    #: Build id → when it was first seen.
    versions: Mapping[str, datetime]
    #: Makes a change fail if somebody else made one since.
    token: bytes


@dataclass(frozen=True)
class RunningWorkflow:
    workflow_id: str
    run_id: str
    kind: str
    build: str


class Deployment:
    """The calls about one deployment. All raise `RPCError`."""

    def __init__(self, temporal: Client, *, name: str, build: str) -> None:
        self._temporal = temporal
        self._service, self._space = temporal.workflow_service, temporal.namespace
        self.name = name
        #: Our own build id.
        self.build = build

    @property
    def config(self) -> WorkerDeploymentConfig:
        """Returns the deployment settings of Temporal workers that host workflows."""
        return WorkerDeploymentConfig(
            version=WorkerDeploymentVersion(deployment_name=self.name, build_id=self.build),
            use_worker_versioning=True,
            default_versioning_behavior=VersioningBehavior.PINNED,
        )

    async def describe(self) -> DeploymentSnapshot | None:
        """Describes the deployment; None if no worker of it has polled yet."""
        request = api.DescribeWorkerDeploymentRequest(
            namespace=self._space, deployment_name=self.name
        )
        answer = await unless_missing(
            self._service.describe_worker_deployment(request, timeout=RPC_TIMEOUT)
        )
        if answer is None:
            return None
        info = answer.worker_deployment_info
        return DeploymentSnapshot(
            current=info.routing_config.current_deployment_version.build_id,
            versions={
                summary.deployment_version.build_id: summary.create_time.ToDatetime()
                for summary in info.version_summaries
            },
            token=answer.conflict_token,
        )

    async def serves(self, queues: Collection[str]) -> bool:
        """Returns True if Temporal knows that our version serves these queues; before, it cannot
        become current."""
        version = VersionName(deployment_name=self.name, build_id=self.build)
        request = api.DescribeWorkerDeploymentVersionRequest(
            namespace=self._space, deployment_version=version
        )
        answer = await unless_missing(
            self._service.describe_worker_deployment_version(request, timeout=RPC_TIMEOUT)
        )
        if answer is None:
            return False
        known = {
            (queue_info.name, queue_info.type)
            for queue_info in answer.worker_deployment_version_info.task_queue_infos
        }
        return all((queue, kind) in known for queue in queues for kind in _KINDS)

    async def make_current(self, seen: DeploymentSnapshot) -> None:
        """Lets new runs start on our version. Raises `RPCError` if somebody else changed it since
        `seen`, or our version serves fewer task queues than the one before."""
        request = api.SetWorkerDeploymentCurrentVersionRequest(
            namespace=self._space,
            deployment_name=self.name,
            build_id=self.build,
            conflict_token=seen.token,
            identity=self._temporal.identity,
        )
        await self._service.set_worker_deployment_current_version(request, timeout=RPC_TIMEOUT)

    async def running(
        self, *, build: str = "", other_than: str = "", limit: int | None = None
    ) -> list[RunningWorkflow]:
        """Open workflows of one version, or of all versions but one."""
        versions = f"= '{self.name}:{build}'" if build else f"!= '{self.name}:{other_than}'"
        query = (
            f"ExecutionStatus = 'Running' AND TemporalWorkerDeployment = '{self.name}' "
            f"AND TemporalWorkerDeploymentVersion {versions}"
        )
        return [
            RunningWorkflow(
                run.id,
                run.run_id,
                run.workflow_type,
                (run.typed_search_attributes.get(_VERSION) or "").partition(":")[2],
            )
            async for run in self._temporal.list_workflows(query, limit=limit)
        ]

    async def served(self, runs: Sequence[RunningWorkflow]) -> bool:
        """Returns True if an orchestrator answers for them; Temporal's list of pollers is minutes
        old."""
        return any(
            await asyncio.gather(
                *(self._answers(run.workflow_id) for run in runs[:_MAX_WORKFLOWS_ASKED])
            )
        )

    async def _answers(self, workflow_id: str) -> bool:
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT_S):
                await self._temporal.get_workflow_handle(workflow_id).query(_ANY_WORKFLOW_KNOWS)
        except WorkflowQueryFailedError:  # an orchestrator took it
            return True
        except (RPCError, TimeoutError):
            return False
        return True

    async def renew(self, run: RunningWorkflow) -> None:
        """Asks an entity to continue as new, which brings it to the current version."""
        await signal_workflow(self._temporal, run.workflow_id, "renew")

    async def hand_over(self, run: RunningWorkflow) -> None:
        """Lets the current version take over this run, by a replay of its history."""
        # Servers before 1.29 read `behavior`.
        behavior = enums.VersioningBehavior.VERSIONING_BEHAVIOR_AUTO_UPGRADE
        override = VersioningOverride(auto_upgrade=True, behavior=behavior)
        request = api.UpdateWorkflowExecutionOptionsRequest(
            namespace=self._space,
            workflow_execution=WorkflowExecution(workflow_id=run.workflow_id, run_id=run.run_id),
            workflow_execution_options=WorkflowExecutionOptions(versioning_override=override),
            update_mask=FieldMask(paths=["versioning_override"]),
            identity=self._temporal.identity,
        )
        try:
            await self._service.update_workflow_execution_options(request, timeout=RPC_TIMEOUT)
        except RPCError as error:
            if error.status not in {RPCStatusCode.NOT_FOUND, RPCStatusCode.FAILED_PRECONDITION}:
                raise  # those two: it has ended, or continued in a new run
