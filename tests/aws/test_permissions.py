"""Each role's actions are named, and they include the launcher's real calls."""

import fnmatch
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import boto3
import pytest

from infra.hosts.ecs import EcsHosts
from infra.hosts.scaling import HostPlan
from tests.support.aws_templates import Templates, listed, text_of
from tests.support.launchers.ecs_environment import EcsHarness, on_moto
from tests.support.launchers.worker_specs import spec

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # botocore's own use of datetime
]
#: Actions that know no resource, or another one than what they are about.
WITHOUT_RESOURCE = {
    "ecr:GetAuthorizationToken",
    "ecs:DiscoverPollEndpoint",
    "ecs:ListTasks",
    "autoscaling:DescribeAutoScalingGroups",
    "ec2:DescribeVolumes",
    "ec2:DescribeSnapshots",
    "ec2:DescribeTags",
}


def statements(templates: Templates) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, policy in templates.resources("AWS::IAM::Policy").items():
        for statement in policy["PolicyDocument"]["Statement"]:
            yield name, statement


def test_every_action_is_named(templates: Templates) -> None:
    for name, statement in statements(templates):
        assert statement["Effect"] == "Allow"
        for action in listed(statement["Action"]):
            assert "*" not in action, (name, action)


def test_only_actions_without_a_resource_are_allowed_on_all(templates: Templates) -> None:
    for name, statement in statements(templates):
        if "*" in listed(statement["Resource"]):
            assert set(listed(statement["Action"])) <= WITHOUT_RESOURCE, name


def actions(templates: Templates, role: str) -> set[str]:
    return {
        action for statement in templates.statements(role) for action in listed(statement["Action"])
    }


def test_the_api_encrypts_and_the_orchestrator_decrypts(templates: Templates) -> None:
    assert {action for action in actions(templates, "ApiRole") if action.startswith("kms:")} == {
        "kms:Encrypt"
    }
    assert {
        action for action in actions(templates, "OrchestratorRole") if action.startswith("kms:")
    } == {"kms:Decrypt"}
    assert {action.partition(":")[0] for action in actions(templates, "ApiRole")} == {
        "kms",
        "secretsmanager",
    }
    assert not any(action.startswith("kms:") for action in actions(templates, "JobsEmailRole"))


def test_only_prepare_writes_secrets(templates: Templates) -> None:
    writers = {
        name
        for name, statement in statements(templates)
        if any(action.startswith("secretsmanager:Put") for action in listed(statement["Action"]))
    }
    assert len(writers) == 1
    assert next(iter(writers)).startswith("PrepareRole")


def test_workers_have_no_role_and_their_start_reads_no_secret_on_hosts(
    templates: Templates,
) -> None:
    execution = actions(templates, "WorkerTasksWorkerTasks")
    assert {action.partition(":")[0] for action in execution} == {"ecr", "logs", "secretsmanager"}
    on_hosts = text_of(templates.task("worker")["ExecutionRoleArn"])
    role = re.sub(r"\W|Arn", "", on_hosts)
    assert not any(action.startswith("secrets") for action in actions(templates, role))


class AllowedCalls:
    """Reads a role's policy as IAM would: an action on a resource, with what the request says."""

    def __init__(self, policy_statements: list[dict[str, Any]], names: dict[str, str]) -> None:
        self._statements = policy_statements
        self._names = names

    def _pattern(self, value: Any) -> str:
        text = text_of(value)
        for name, meaning in self._names.items():
            text = re.sub(name, meaning, text)
        return text

    def allows(self, action: str, resource: str, context: dict[str, str]) -> bool:
        return any(
            action in listed(statement["Action"])
            and any(
                fnmatch.fnmatchcase(resource, self._pattern(each))
                for each in listed(statement["Resource"])
            )
            and all(
                context.get(key) == self._pattern(pattern)
                for conditions in statement.get("Condition", {}).values()
                for key, pattern in conditions.items()
            )
            for statement in self._statements
        )


HERE = "arn:aws:ecs:ap-northeast-1:123456789012"
EXECUTION = "arn:aws:iam::123456789012:role/worker-tasks"
QUEUE = "arn:aws:sqs:ap-northeast-1:123456789012:changes"


def policy_of(templates: Templates) -> AllowedCalls:
    """Returns the orchestrator's policy, with the names of moto's account."""
    stage = templates.stage
    return AllowedCalls(
        templates.statements("OrchestratorRole"),
        {
            r"\$\{AWS::Partition\}": "aws",
            r"\$\{AWS::Region\}": "ap-northeast-1",
            r"\$\{AWS::AccountId\}": "123456789012",
            r"\$\{HostsCluster\w+\.Arn\}": f"{HERE}:cluster/berth",
            r"\$\{HostsCluster\w+\}": "berth",
            rf"berth-{stage}-worker:": "berth-worker:",
            r"\$\{TaskEventsChanges\w+\.Arn\}": QUEUE,
            r"\$\{WorkerTasks[0-9A-F]+\.Arn\}": EXECUTION,
            r"\$\{HostsWorkersProvider\w+\}": "workers",
            r"\$\{HostsWorkersGroup\w+\}": "workers",
        },
    )


def needed(operation: str, request: dict[str, Any]) -> list[tuple[str, str, dict[str, str]]]:
    """Returns what IAM asks for one call: action, resource, condition keys. (Service Authorization
    Reference)"""
    cluster = {
        "ecs:cluster": f"{HERE}:cluster/{request.get('cluster', 'berth').rpartition('/')[2]}"
    }
    task = f"{HERE}:task/berth/0123456789abcdef"
    match operation:
        case "RunTask":
            asked = [
                ("ecs:RunTask", f"{HERE}:task-definition/{request['taskDefinition']}:1", cluster),
                ("iam:PassRole", EXECUTION, {"iam:PassedToService": "ecs-tasks.amazonaws.com"}),
            ]
            if request.get("tags"):
                asked.append(("ecs:TagResource", task, {"ecs:CreateAction": "RunTask"}))
            return asked
        case "StopTask" | "DescribeTasks":
            return [(f"ecs:{operation}", task, cluster)]
        case "ListTasks":
            return [("ecs:ListTasks", "*", cluster)]
        case "ListContainerInstances":
            return [("ecs:ListContainerInstances", f"{HERE}:cluster/berth", {})]
        case "DescribeContainerInstances":
            return [(f"ecs:{operation}", f"{HERE}:container-instance/berth/0123", {})]
        case "DescribeCapacityProviders" | "UpdateCapacityProvider":
            return [(f"ecs:{operation}", f"{HERE}:capacity-provider/workers", {})]
        case "DescribeAutoScalingGroups":
            return [("autoscaling:DescribeAutoScalingGroups", "*", {})]
        case "UpdateAutoScalingGroup":
            group = (
                HERE.replace(":ecs:", ":autoscaling:")
                + ":autoScalingGroup:0f:autoScalingGroupName/workers"
            )
            return [("autoscaling:UpdateAutoScalingGroup", group, {})]
        case "ReceiveMessage":
            return [("sqs:ReceiveMessage", QUEUE, {})]
        case "DeleteMessageBatch" | "DeleteMessage":
            return [("sqs:DeleteMessage", QUEUE, {})]
    raise AssertionError(f"a call that nobody thought of: {operation}")


class RecordedCalls:
    """Records every call of every client of boto3 that is made while it is in use."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        make = boto3.client

        def client(*words: Any, **options: Any) -> Any:
            made = make(*words, **options)
            made.meta.events.register("provide-client-params.*.*", self._note)
            return made

        patch.setattr(boto3, "client", client)

    def _note(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        self.calls.append((model.name, dict(params)))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedCalls:
    return RecordedCalls(monkeypatch)


@pytest.fixture
async def harness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EcsHarness]:
    async with on_moto(monkeypatch) as harness:
        yield harness


async def test_the_role_allows_all_that_the_launcher_calls(
    templates: Templates, harness: EcsHarness, recorded: RecordedCalls
) -> None:
    launcher = harness.client()
    first = await launcher.launch(spec("w-1"), "token-1")
    second = await launcher.launch(spec("w-2"), "token-2")
    assert await launcher.stop(first.task_id, "test")
    exits = launcher.exits()
    assert (await anext(exits)).task_id == first.task_id  # a listing shows it
    await harness.crash(second)
    assert (await anext(exits)).task_id == second.task_id
    await exits.aclose()  # type: ignore[attr-defined]
    assert await launcher.list() == []
    policy = policy_of(templates)
    for operation, request in recorded.calls:
        if operation in ("CreateCluster", "RegisterTaskDefinition", "CreateQueue", "SendMessage"):
            continue  # the test's own
        for action, resource, context in needed(operation, request):
            assert policy.allows(action, resource, context), (operation, action, resource)
    assert {"RunTask", "StopTask", "ListTasks", "DescribeTasks", "ReceiveMessage"} <= {
        operation for operation, _ in recorded.calls
    }


async def test_the_role_allows_what_sets_the_hosts(
    templates: Templates, recorded: RecordedCalls, hosts: EcsHosts
) -> None:
    recorded.calls.clear()  # those that made the cluster
    await hosts.hosts()
    await hosts.scale(HostPlan(workers=60, needed=2, warm=1))
    calls, recorded.calls = recorded.calls, []
    policy = policy_of(templates)
    for operation, request in calls:
        for action, resource, context in needed(operation, request):
            assert policy.allows(action, resource, context), (operation, action)
    assert "UpdateCapacityProvider" in {operation for operation, _ in calls}


def test_tasks_of_another_cluster_are_out_of_its_reach(templates: Templates) -> None:
    policy = policy_of(templates)
    other = {"ecs:cluster": f"{HERE}:cluster/other"}
    assert not policy.allows("ecs:RunTask", f"{HERE}:task-definition/berth-worker:1", other)
    assert not policy.allows("ecs:StopTask", f"{HERE}:task/other/01", other)
    assert not policy.allows("ecs:RunTask", f"{HERE}:task-definition/berth-api:1", {})
    assert not policy.allows("iam:PassRole", "arn:aws:iam::123456789012:role/admin", {})
