"""The margin given to an ECS capacity provider, on a simulated AWS."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import boto3
import pytest
from moto.ec2.utils import generate_instance_identity_document

from infra.hosts.ecs import EcsHosts
from infra.hosts.scaling import HostsUnreachable, plan_hosts
from tests.support.ecs_hosts import CLUSTER, PROVIDER, REGION, make_ecs_hosts, simulate_aws


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with simulate_aws(monkeypatch):
        yield


@pytest.fixture
async def hosts(aws: None) -> AsyncIterator[EcsHosts]:
    async with make_ecs_hosts() as hosts:
        yield hosts


def provider() -> dict[str, Any]:
    answer = boto3.client("ecs", REGION).describe_capacity_providers(capacityProviders=[PROVIDER])
    scaling: dict[str, Any] = answer["capacityProviders"][0]["autoScalingGroupProvider"][
        "managedScaling"
    ]
    return scaling


def group() -> dict[str, Any]:
    answer = boto3.client("autoscaling", REGION).describe_auto_scaling_groups()
    scaling_group: dict[str, Any] = answer["AutoScalingGroups"][0]
    return scaling_group


async def test_a_plan_becomes_the_target_capacity_and_the_group_s_minimum(hosts: EcsHosts) -> None:
    made = plan_hosts(150, await hosts.hosts(), warm=1)
    assert await hosts.scale(made)
    assert provider()["targetCapacity"] == 83  # 5 of 6 hosts in use
    assert provider()["maximumScalingStepSize"] == 5, "what an operator set is kept"
    assert group()["MinSize"] == 6
    assert not await hosts.scale(made), "the provider has it already"


async def test_no_more_hosts_are_asked_for_than_the_group_allows(hosts: EcsHosts) -> None:
    await hosts.scale(plan_hosts(3000, warm=2))
    assert group()["MinSize"] == 10


async def test_hosts_are_listed_as_starting_serving_or_draining(hosts: EcsHosts) -> None:
    await hosts.scale(plan_hosts(60, warm=1))
    instances = [instance["InstanceId"] for instance in group()["Instances"]]
    assert len(instances) == 3
    ecs, ec2 = boto3.client("ecs", REGION), boto3.resource("ec2", REGION)
    arns = []
    for instance in instances[:2]:
        document = generate_instance_identity_document(ec2.Instance(instance))
        registered = ecs.register_container_instance(
            cluster=CLUSTER, instanceIdentityDocument=json.dumps(document)
        )
        arns.append(registered["containerInstance"]["containerInstanceArn"])
    ecs.update_container_instances_state(
        cluster=CLUSTER, containerInstances=arns[:1], status="DRAINING"
    )
    registered_hosts = await hosts.hosts()
    made = plan_hosts(60, registered_hosts, warm=1)
    assert (len(registered_hosts), made.ready, made.draining) == (3, 1, 1)


async def test_an_answer_of_aws_that_is_an_error_is_typed(hosts: EcsHosts) -> None:
    other = EcsHosts(cluster=CLUSTER, capacity_provider="nobody", region=REGION)
    with pytest.raises(HostsUnreachable):
        await other.hosts()
    await other.close()
