"""A new version of the orchestrator takes over: beside the old one, after it, or in the middle of a
claim."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.orchestrator.deployment import Deployment
from infra.local.components import OrchestratorComponent
from infra.local.stack import LocalStack
from infra.temporal.connection import open_client
from tests.support.systems.local import POOL, RunningSystem, Trader, run_system, until
from workflows import names
from workflows.user_worker.messages import ReloadResult

pytestmark = [pytest.mark.drill, pytest.mark.timeout(180)]

T = TypeVar("T")
_builds = itertools.count(1)


class VersionedFleet:
    """A running system whose orchestrators come and go."""

    def __init__(self, system: RunningSystem) -> None:
        self.system = system
        self.stack = system.stack

    def start(self, **settings: Any) -> OrchestratorComponent:
        """Another orchestrator, of a build that was never there unless `build_id` says
        otherwise."""
        settings.setdefault("build_id", f"b{next(_builds)}")
        made = self.stack.add_orchestrator(**settings)
        made.start()
        return made

    def sole(self) -> OrchestratorComponent | None:
        """The only orchestrator that runs, if its version is the current one."""
        running = [
            orchestrator for orchestrator in self.stack.orchestrators if orchestrator.running
        ]
        if len(running) == 1 and self.current() == running[0].settings.build_id:
            return running[0]
        return None

    def stop_all_but(self, kept: OrchestratorComponent) -> None:
        for orchestrator in self.stack.orchestrators:
            if orchestrator is not kept and orchestrator.running:
                orchestrator.stop()

    def ask(self, question: Callable[[Client], Awaitable[T]]) -> T:
        """Asks Temporal; again while it says that a deployment got too many requests in this
        moment."""

        async def asked() -> T:
            return await question(await open_client(self.stack.settings))

        def answer() -> list[T] | None:
            try:
                return [asyncio.run(asked())]
            except RPCError as error:
                if error.status is not RPCStatusCode.RESOURCE_EXHAUSTED:
                    raise
                return None

        return until(answer, "answer about the deployment")[0]

    def current(self) -> str:
        async def read(client: Client) -> str:
            seen = await Deployment(client, name="berth", build="").describe()
            return seen.current if seen else ""

        return self.ask(read)

    def version_of(self, workflow_id: str) -> str:
        """The build that a workflow is pinned to."""

        async def describe(client: Client) -> str:
            answer = await client.workflow_service.describe_workflow_execution(
                DescribeWorkflowExecutionRequest(
                    namespace=client.namespace, execution=WorkflowExecution(workflow_id=workflow_id)
                )
            )
            return answer.workflow_execution_info.versioning_info.deployment_version.build_id

        return self.ask(describe)

    def run_of(self, trader: Trader) -> str:
        async def describe(client: Client) -> str:
            return (
                await client.get_workflow_handle(names.user_worker_id(trader.user_id)).describe()
            ).run_id

        return self.ask(describe)

    def reload(self, trader: Trader) -> ReloadResult:
        async def update(client: Client) -> ReloadResult:
            result: ReloadResult = await client.get_workflow_handle(
                names.user_worker_id(trader.user_id)
            ).execute_update("reload_credentials_now", result_type=ReloadResult)
            return result

        return self.ask(update)

    def wait_moved(self, build: str) -> None:
        """Waits until no open workflow is of another version. The mover asks an entity again after
        30 s."""

        async def left(client: Client) -> int:
            return len(
                await Deployment(client, name="berth", build=build).running(other_than=build)
            )

        until(lambda: self.ask(left) == 0, f"workflows all on {build}", 90.0)

    def logged(self, orchestrator: OrchestratorComponent, event: str) -> bool:
        return f'"{event}"' in orchestrator.log_path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def fleet() -> Iterator[VersionedFleet]:
    with run_system(
        lambda folder: LocalStack(
            folder,
            durable=False,
            pool_target=POOL,
            connect_timeout=10.0,
            api_processes=1,
            build_id="b0",
        )
    ) as system:
        yield VersionedFleet(system)


@pytest.fixture
def old(fleet: VersionedFleet) -> OrchestratorComponent:
    """The only orchestrator; its version is current and has all workflows."""
    made = fleet.sole() or fleet.start()
    fleet.stop_all_but(made)
    fleet.wait_moved(made.settings.build_id)
    fleet.stack.wait_pool(POOL)
    return made


def test_workflows_whose_version_nobody_serves_any_more_continue_with_the_next_one(
    fleet: VersionedFleet, old: OrchestratorComponent
) -> None:
    """The usual upgrade on one machine: the old one is gone before the new one comes."""
    system = fleet.system
    started, reloaded, stopped = traders = [system.trader() for _ in range(3)]
    before = [system.start_until_active(trader)["worker_id"] for trader in traders]
    old.stop()
    waiting = system.begin(started)  # comes while nobody is there
    new = fleet.start()
    answer = waiting.result(45)
    assert answer.status_code == 200, answer.text
    assert answer.json()["worker_id"] == before[0]
    assert fleet.reload(reloaded).ok
    assert system.start_until_active(reloaded)["worker_id"] == before[1]
    ended = system.call("POST", f"/v1/users/{stopped.user_id}/worker/stop", stopped.api_key)
    assert ended.is_success, ended.text
    until(lambda: not system.open_sessions(stopped), "end of the session")
    fleet.wait_moved(new.settings.build_id)
    assert fleet.version_of(names.user_worker_id(started.user_id)) == new.settings.build_id
    assert fleet.version_of(names.worker_pool_id("default")) == new.settings.build_id
    assert system.order(started).status_code == 201
    assert len(system.sessions(started)) == 1  # nothing of it reached the broker


def test_while_the_old_version_runs_entities_finish_their_run_there_and_continue_on_the_new_one(
    fleet: VersionedFleet, old: OrchestratorComponent
) -> None:
    system = fleet.system
    trader = system.trader()
    worker = system.start_until_active(trader)["worker_id"]
    run = fleet.run_of(trader)
    new = fleet.start()
    fleet.wait_moved(new.settings.build_id)
    assert fleet.run_of(trader) != run

    async def builds(client: Client) -> set[str]:
        history = await client.get_workflow_handle(
            names.user_worker_id(trader.user_id), run_id=run
        ).fetch_history()
        tasks = [event.workflow_task_completed_event_attributes for event in history.events]
        return {task.deployment_version.build_id for task in tasks} - {""}

    assert fleet.ask(builds) == {old.settings.build_id}
    old.stop()
    assert system.start_until_active(trader)["worker_id"] == worker
    assert fleet.version_of(names.user_worker_id(trader.user_id)) == new.settings.build_id
    newcomer = system.trader()
    system.start_until_active(newcomer)
    assert fleet.version_of(names.user_worker_id(newcomer.user_id)) == new.settings.build_id


def test_an_old_build_that_comes_back_next_to_a_newer_one_changes_nothing(
    fleet: VersionedFleet, old: OrchestratorComponent
) -> None:
    new = fleet.start()
    fleet.wait_moved(new.settings.build_id)
    old.stop()
    old.start()
    assert fleet.logged(old, "not_promoted")
    assert fleet.current() == new.settings.build_id


def test_an_old_build_takes_over_when_nobody_serves_the_newer_one(
    fleet: VersionedFleet, old: OrchestratorComponent
) -> None:
    """A step back: the orchestrators of the new version were all taken away."""
    trader = fleet.system.trader()
    new = fleet.start()
    worker = fleet.system.start_until_active(trader)["worker_id"]
    fleet.wait_moved(new.settings.build_id)
    old.stop()
    new.stop()
    old.start()
    assert fleet.current() == old.settings.build_id
    assert fleet.system.start_until_active(trader)["worker_id"] == worker
    fleet.wait_moved(old.settings.build_id)


def test_an_orchestrator_that_may_not_promote_waits_for_an_operator(
    fleet: VersionedFleet, old: OrchestratorComponent
) -> None:
    new = fleet.start(promote=False)
    assert fleet.current() == old.settings.build_id

    async def promote(client: Client) -> None:
        deployment = Deployment(client, name="berth", build=new.settings.build_id)
        seen = await deployment.describe()
        assert seen is not None
        await deployment.make_current(seen)

    fleet.ask(promote)
    fleet.wait_moved(new.settings.build_id)
    assert fleet.current() == new.settings.build_id


def test_an_orchestrator_that_stops_in_the_middle_of_a_claim_leaves_it_to_the_others(
    fleet: VersionedFleet, old: OrchestratorComponent
) -> None:
    """Rolling restart: each build has two orchestrators, and each is stopped while users start."""
    system = fleet.system
    other = fleet.start(build_id=old.settings.build_id)
    for stopped in (old, other):
        fleet.stack.wait_pool(POOL)
        traders = [system.trader() for _ in range(POOL)]
        for trader in traders:
            system.slow_login(trader, 2.5)
        before = system.claims()
        answers = [system.begin(trader) for trader in traders]
        system.next_claim(before)
        stopped.stop()
        stopped.start()
        for trader, answer in zip(traders, answers, strict=True):
            result = answer.result(45)
            assert result.status_code == 200, result.text
            assert len(system.sessions(trader)) == 1
