"""Hosts of an ECS capacity provider with managed scaling.

ECS starts and ends instances itself, by running and waiting tasks. We set two numbers.
`targetCapacity` is the share of instances that should be in use: below 100, ECS keeps the rest
warm. The Auto Scaling group's minimum covers wanted workers that have no task yet, such as those of
the morning, and the warm hosts of an empty cluster, for which ECS takes 0 of 0 tasks as 100 %.
Termination protection and draining are left to ECS.

https://docs.aws.amazon.com/AmazonECS/latest/developerguide/cluster-auto-scaling.html
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import boto3
import structlog
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.hosts.scaling import Host, HostPlan, HostsUnreachable

#: Most instances in one DescribeContainerInstances call.
MAX_INSTANCES_PER_CALL = 100
#: Seconds to connect, and for an answer. The caller repeats in its next round.
_CONFIG = Config(
    connect_timeout=5, read_timeout=10, retries={"mode": "standard", "total_max_attempts": 3}
)

T = TypeVar("T")

log = structlog.get_logger()


class EcsHosts:
    """Implements `HostScaler`. boto3 blocks, so each call runs in a thread."""

    def __init__(self, *, cluster: str, capacity_provider: str, region: str | None = None) -> None:
        self._cluster = cluster
        self._provider = capacity_provider
        self._ecs = boto3.client("ecs", region_name=region, config=_CONFIG)
        self._groups = boto3.client("autoscaling", region_name=region, config=_CONFIG)

    async def hosts(self) -> list[Host]:
        return await self._call(self._hosts)

    async def scale(self, plan: HostPlan) -> bool:
        return await self._call(self._scale, plan)

    async def close(self) -> None:
        await asyncio.to_thread(self._ecs.close)
        await asyncio.to_thread(self._groups.close)

    @staticmethod
    async def _call(call: Callable[..., T], *given: Any) -> T:
        try:
            return await asyncio.to_thread(call, *given)
        except (BotoCoreError, ClientError, LookupError) as error:
            raise HostsUnreachable(f"{type(error).__name__}: {error}"[:300]) from None

    # --- in a thread ------------------------------------------------------------------------------

    def _hosts(self) -> list[Host]:
        hosts = []
        for status in ("ACTIVE", "DRAINING", "REGISTERING"):
            pages = self._ecs.get_paginator("list_container_instances").paginate(
                cluster=self._cluster,
                status=status,
                PaginationConfig={"PageSize": MAX_INSTANCES_PER_CALL},
            )
            for page in pages:
                if arns := page["containerInstanceArns"]:
                    about = {"cluster": self._cluster, "containerInstances": arns}
                    answer = self._ecs.describe_container_instances(**about)
                    hosts += [self._host(instance) for instance in answer["containerInstances"]]
        known = {host.host_id for host in hosts}
        # Instances that the group has started and that are not in the cluster yet.
        for instance in self._group()["Instances"]:
            if instance["InstanceId"] not in known and instance["LifecycleState"].startswith(
                ("Pending", "InService")
            ):
                hosts.append(Host(host_id=instance["InstanceId"], ready=False))
        return hosts

    @staticmethod
    def _host(instance: dict[str, Any]) -> Host:
        return Host(
            host_id=instance.get("ec2InstanceId") or instance["containerInstanceArn"],
            workers=instance.get("runningTasksCount", 0) + instance.get("pendingTasksCount", 0),
            ready=instance["status"] != "REGISTERING" and instance.get("agentConnected", True),
            draining=instance["status"] == "DRAINING",
        )

    def _capacity_provider(self) -> dict[str, Any]:
        """Returns the Auto Scaling part of our capacity provider."""
        answer = self._ecs.describe_capacity_providers(capacityProviders=[self._provider])
        provider: dict[str, Any] = answer["capacityProviders"][0]["autoScalingGroupProvider"]
        return provider

    def _group(self, provider: dict[str, Any] | None = None) -> dict[str, Any]:
        arn = (provider or self._capacity_provider())["autoScalingGroupArn"]
        name = arn.rpartition("autoScalingGroupName/")[2]
        answer = self._groups.describe_auto_scaling_groups(AutoScalingGroupNames=[name])
        group: dict[str, Any] = answer["AutoScalingGroups"][0]
        return group

    def _scale(self, plan: HostPlan) -> bool:
        provider = self._capacity_provider()
        group = self._group(provider)
        managed = provider.get("managedScaling", {})
        changed = False
        if (
            managed.get("targetCapacity", 100) != plan.target_capacity
            or managed.get("status") != "ENABLED"
        ):
            changed = True
            self._ecs.update_capacity_provider(
                name=self._provider,
                autoScalingGroupProvider={
                    "managedScaling": {
                        **managed,
                        "status": "ENABLED",
                        "targetCapacity": plan.target_capacity,
                    }
                },
            )
        least = min(plan.wanted, group["MaxSize"])
        if least < plan.wanted:
            log.warning("hosts_capped", wanted=plan.wanted, most=group["MaxSize"])
        if group["MinSize"] != least:
            changed = True
            # A minimum above the desired number raises it, too: AWS starts the hosts at once.
            self._groups.update_auto_scaling_group(
                AutoScalingGroupName=group["AutoScalingGroupName"], MinSize=least
            )
        if changed:
            log.info("hosts_scaled", wanted=least, target_capacity=plan.target_capacity)
        return changed
