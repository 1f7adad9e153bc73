"""The margin given to an ECS capacity provider, on a simulated AWS."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.ec2.utils import generate_instance_identity_document

from infra.hosts.ecs import EcsHosts
from infra.hosts.scaling import HostsUnreachable, plan_hosts

REGION = "ap-northeast-1"
CLUSTER, PROVIDER, GROUP = "berth", "berth-hosts", "berth-group"


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    with mock_aws():
        yield


@pytest.fixture
async def hosts(aws: None) -> AsyncIterator[EcsHosts]:
    """A cluster whose group has at most ten hosts, and none now."""
    ec2 = boto3.client("ec2", REGION)
    groups, ecs = boto3.client("autoscaling", REGION), boto3.client("ecs", REGION)
    image = ec2.describe_images()["Images"][0]["ImageId"]
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    groups.create_launch_configuration(
        LaunchConfigurationName="host", ImageId=image, InstanceType="t3.xlarge"
    )
    groups.create_auto_scaling_group(
        AutoScalingGroupName=GROUP,
        LaunchConfigurationName="host",
        MinSize=0,
        MaxSize=10,
        DesiredCapacity=0,
        VPCZoneIdentifier=subnet,
    )
    arn = groups.describe_auto_scaling_groups()["AutoScalingGroups"][0]["AutoScalingGroupARN"]
    ecs.create_cluster(clusterName=CLUSTER)
    ecs.create_capacity_provider(
        name=PROVIDER,
        autoScalingGroupProvider={
            "autoScalingGroupArn": arn,
            "managedScaling": {
                "status": "ENABLED",
                "targetCapacity": 100,
                "maximumScalingStepSize": 5,
            },
            "managedTerminationProtection": "DISABLED",
        },
    )
    made = EcsHosts(cluster=CLUSTER, capacity_provider=PROVIDER, region=REGION)
    yield made
    await made.close()


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
    assert not await hosts.scale(made), "told already"


async def test_no_more_hosts_are_asked_for_than_the_group_allows(hosts: EcsHosts) -> None:
    await hosts.scale(plan_hosts(3000, warm=2))
    assert group()["MinSize"] == 10


async def test_hosts_tell_whether_they_start_serve_or_drain(hosts: EcsHosts) -> None:
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
