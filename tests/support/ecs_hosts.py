"""A cluster of ECS with a capacity provider, on moto."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import boto3
import pytest
from moto import mock_aws

from infra.hosts.ecs import EcsHosts

REGION = "ap-northeast-1"
CLUSTER, PROVIDER, GROUP = "berth", "berth-hosts", "berth-group"


@contextmanager
def simulate_aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Answers all calls of boto3 by moto, with credentials that no real AWS takes."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    with mock_aws():
        yield


@asynccontextmanager
async def make_ecs_hosts() -> AsyncIterator[EcsHosts]:
    """Makes a cluster whose group has at most ten hosts, and none now."""
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
