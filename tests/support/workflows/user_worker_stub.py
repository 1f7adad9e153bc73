"""A stand-in for the user's workflow, under its real name: it does what the test's `LifecycleStub`
says."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from tests.support.workers.api_worker import ScriptedWorker
from workflows.names import LIFECYCLE_QUEUE, SA_POOL, SA_STATE, SA_USER, SA_WORKER, USER_WORKER
from workflows.user_worker.messages import (
    ActiveWorker,
    EnsureActive,
    ReloadResult,
    ShutdownRequest,
    UserWorkerInput,
    UserWorkerView,
    WorkerRef,
)


class LifecycleStub:
    """What `ensure_active` does, and what the workflows were told."""

    def __init__(self, valkey_url: str) -> None:
        self.valkey_url = valkey_url
        self.calls: list[EnsureActive] = []
        self._updates: set[str] = set()
        #: Codes of failures to come, one for each call; then it succeeds.
        self.failures: list[str] = []
        #: Set to let a call go on.
        self.go = asyncio.Event()
        self.go.set()
        self.signals: list[tuple[str, str]] = []
        #: What the workflow knows of the session's health.
        self.health = "degraded: broker unreachable"
        self.workers: list[ScriptedWorker] = []
        #: Claims by run and activity id.
        self._claims: dict[tuple[str, str], asyncio.Future[str]] = {}
        #: What the update `reload_credentials_now` returns; None: nothing before the workflow ends.
        self.reload: ReloadResult | None = ReloadResult(ok=True)

    def called(self, update_id: str, request: EnsureActive) -> None:
        """Counts an update once: a task that was not completed in time runs again, and that is no
        replay."""
        if update_id not in self._updates:
            self._updates.add(update_id)
            self.calls.append(request)

    @activity.defn(name="claim_for_test")
    async def claim(self, user_id: str) -> str:
        """Starts a scripted worker, or returns the next scripted failure.

        A workflow task that times out on a busy machine runs its local activity again. That run
        gets the result of the first one, so that one claim never starts two workers.
        """
        info = activity.info()
        key = (info.workflow_run_id or "", info.activity_id)
        if key not in self._claims:
            self._claims[key] = asyncio.ensure_future(self._claim_once(user_id))
        return await asyncio.shield(self._claims[key])

    async def _claim_once(self, user_id: str) -> str:
        await self.go.wait()
        if self.failures:
            return self.failures.pop(0)
        worker = ScriptedWorker(self.valkey_url, user_id)
        await worker.start()
        self.workers.append(worker)
        return ""

    async def close(self) -> None:
        self.go.set()
        for worker in self.workers:
            await worker.stop()


#: The running test's; set by the fixture.
present: list[LifecycleStub] = []


@workflow.defn(name=USER_WORKER)
class ScriptedUserWorker:
    @workflow.init
    def __init__(self, start: UserWorkerInput) -> None:
        self.user_id = start.user_id
        self.done = False
        self.active = False

    @workflow.run
    async def run(self, start: UserWorkerInput) -> None:
        await workflow.wait_condition(lambda: self.done)
        await workflow.wait_condition(workflow.all_handlers_finished)

    @workflow.update(name="ensure_active")
    async def ensure_active(self, request: EnsureActive) -> ActiveWorker:
        if not workflow.unsafe.is_replaying():
            update = workflow.current_update_info()
            present[-1].called(update.id if update else "", request)
        failure = await workflow.execute_local_activity(
            "claim_for_test",
            self.user_id,
            result_type=str,
            schedule_to_close_timeout=timedelta(seconds=30),
            retry_policy=RetryPolicy(maximum_attempts=1),
        )
        if failure == "CLOSES":
            self.done = True
            await workflow.wait_condition(lambda: False)
        if failure:
            raise ApplicationError(
                f"scripted {failure}", type=failure, non_retryable=failure != "LAUNCHER_BUSY"
            )
        self.active = True
        workflow.upsert_search_attributes(
            [
                SA_USER.value_set(self.user_id),
                SA_STATE.value_set("Active"),
                SA_WORKER.value_set("scripted"),
                SA_POOL.value_set("default"),
            ]
        )
        worker = WorkerRef(worker_id="scripted", task_id="t", epoch=1, claim_id="c", pool="default")
        return ActiveWorker(
            worker=worker, state="Active", claimed_at=1_700_000_000.0, connected_at=0.0
        )

    @workflow.signal(name="shutdown")
    def shutdown(self, request: ShutdownRequest) -> None:
        present[-1].signals.append(("shutdown", request.reason))
        self.done = True

    @workflow.signal(name="reload_credentials")
    def reload_credentials(self) -> None:
        present[-1].signals.append(("reload_credentials", ""))

    @workflow.signal(name="resume")
    def resume(self) -> None:
        present[-1].signals.append(("resume", ""))

    @workflow.update(name="reload_credentials_now")
    async def reload_credentials_now(self) -> ReloadResult:
        if present[-1].reload is None:
            await workflow.wait_condition(lambda: self.done)
            raise ApplicationError("closed", type="AcceptedUpdateCompletedWorkflow")
        return present[-1].reload

    @workflow.query(name="view")
    def view(self) -> UserWorkerView:
        return UserWorkerView(
            user_id=self.user_id,
            state="Active" if self.active else "PoolIdle",
            since=1_700_000_000.0,
            worker=None,
            attempts=1,
            reason="",
            next_step="",
            deadline=None,
            health=present[-1].health,
            health_at=1_700_000_060.0,
            crashes=2,
            last_activity=1_700_000_030.0,
            note="credentials refused: LOGIN_REJECTED: wrong key",
        )


def orchestrator(client: Client, lifecycle: LifecycleStub) -> Worker:
    present[:] = [lifecycle]
    return Worker(
        client,
        task_queue=LIFECYCLE_QUEUE,
        workflows=[ScriptedUserWorker],
        activities=[lifecycle.claim],
        workflow_runner=UnsandboxedWorkflowRunner(),
        # Else a task in which the machine stands still for 2 s fails, and what it told is told
        # twice.
        debug_mode=True,
    )
