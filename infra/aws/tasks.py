"""A task of one of our servers: the container, its settings, its keys and its role.

A container next to it copies the key files of its role from Secrets Manager into memory that both
share, and follows them (`infra/vault/secret_folders.py`). So no key is in an environment, a
template or on a disk.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aws_cdk import Duration
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_secretsmanager as secretsmanager
from constructs import Construct

from infra.aws.data import RDS_AUTHORITIES, Storage
from infra.aws.hosts import AUTHORITIES_FOLDER, log_group
from infra.aws.stages import AwsStage
from infra.vault.secret_folders import COMPLETE

#: The user that servers run as (infra/images/server.Dockerfile).
SERVER_UID = 10001


@dataclass(frozen=True, kw_only=True)
class TaskSize:
    """CPU units of 1/1024 vCPU, and MiB."""

    cpu: int
    soft: int
    hard: int


#: The size of the container that copies the keys. It reserves no CPU: two API tasks fill a host of
#: 2,048 units.
KEYS_SIZE = TaskSize(cpu=0, soft=64, hard=192)


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """Says what one kind of server runs."""

    name: str
    command: Sequence[str]
    size: TaskSize
    #: Settings by their names in small letters; what is no text is written as JSON.
    settings: Mapping[str, Any]
    #: Settings that come from a secret: their text is in the environment of the container alone.
    secrets: Mapping[str, secretsmanager.ISecret] = field(default_factory=dict)
    #: Names of the folders of keys that it reads.
    folders: Sequence[str]
    health: Sequence[str]
    port: int | None = None
    #: Seconds from SIGTERM to SIGKILL, and the first seconds in which it need not be healthy.
    stop: int = 45
    start: int = 60


def environment(settings: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"BERTH_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in settings.items()
    }


class ServerTask(Construct):
    def __init__(
        self,
        scope: Construct,
        stage: AwsStage,
        storage: Storage,
        key: kms.IKey,
        image_tag: str,
        spec: ServerSpec,
        *,
        changes_keys: bool = False,
    ) -> None:
        """Creates a task. `changes_keys` is for a command that ends, and whose changes of the
        folders are stored."""
        super().__init__(scope, spec.name.title())
        image = image_of(storage.images["server"], image_tag)
        self.role = iam.Role(
            self,
            "Role",
            assumed_by=iam.ServicePrincipal("ecs-tasks.amazonaws.com"),
            description=f"Berth, {stage.name}: what {spec.name} may do",
        )
        self.definition = ecs.Ec2TaskDefinition(
            self,
            "Task",
            family=f"berth-{stage.name}-{spec.name}",
            network_mode=ecs.NetworkMode.BRIDGE,
            task_role=self.role,
            volumes=[
                ecs.Volume(
                    name="keys",
                    docker_volume_configuration=ecs.DockerVolumeConfiguration(
                        driver="local",
                        scope=ecs.Scope.TASK,
                        driver_opts={
                            "type": "tmpfs",
                            "device": "tmpfs",
                            "o": f"size=4m,mode=0700,uid={SERVER_UID},gid={SERVER_UID}",
                        },
                    ),
                ),
                ecs.Volume(name="authorities", host=ecs.Host(source_path=AUTHORITIES_FOLDER)),
            ],
        )
        self.log = log_group(self, spec.name.title(), stage, key)
        folders = {f"/keys/{name}": storage.folders[name] for name in spec.folders}
        for secret in folders.values():
            secret.grant_read(self.role)
            if changes_keys:
                secret.grant_write(self.role)
        named = {"secret_folders": {path: secret.secret_arn for path, secret in folders.items()}}
        follow = ("python", "-m", "infra.vault.secret_folders")
        settings = {**spec.settings, **(named if changes_keys else {})}
        self.container = self._container(
            spec.name,
            image,
            command=[*follow, "run", *spec.command] if changes_keys else spec.command,
            size=spec.size,
            environment=environment(settings),
            secrets={
                f"BERTH_{name.upper()}": ecs.Secret.from_secrets_manager(secret)
                for name, secret in spec.secrets.items()
            },
            health=None if changes_keys else (spec.health, spec.start),
            stop=spec.stop,
        )
        if spec.port is not None:
            self.container.add_port_mappings(ecs.PortMapping(container_port=spec.port, host_port=0))
        if not changes_keys:
            complete = [word for path in folders for word in ("-a", "-e", f"{path}/{COMPLETE}")][1:]
            keys = self._container(
                "keys",
                image,
                command=[*follow, "follow"],
                size=KEYS_SIZE,
                environment=environment(named),
                secrets={},
                health=(["test", *complete], 30),
                stop=2,
            )
            self.container.add_container_dependencies(
                ecs.ContainerDependency(
                    container=keys, condition=ecs.ContainerDependencyCondition.HEALTHY
                )
            )

    def _container(
        self,
        name: str,
        image: ecs.ContainerImage,
        *,
        command: Sequence[str],
        size: TaskSize,
        environment: dict[str, str],
        secrets: dict[str, ecs.Secret],
        health: tuple[Sequence[str], int] | None,
        stop: int,
    ) -> ecs.ContainerDefinition:
        linux = ecs.LinuxParameters(self, f"{name.title()}Linux", init_process_enabled=True)
        linux.drop_capabilities(ecs.Capability.ALL)
        # Root's, with the mode of the image's folder: there /tmp alone may be written by all.
        linux.add_tmpfs(ecs.Tmpfs(container_path="/tmp", size=64))
        container = self.definition.add_container(
            name.title(),
            container_name=name,
            image=image,
            command=list(command),
            cpu=size.cpu,
            memory_reservation_mib=size.soft,
            memory_limit_mib=size.hard,
            environment=environment,
            secrets=secrets,
            logging=ecs.LogDriver.aws_logs(stream_prefix=name, log_group=self.log),
            linux_parameters=linux,
            docker_security_options=["no-new-privileges"],
            readonly_root_filesystem=True,
            stop_timeout=Duration.seconds(stop),
            essential=True,
            health_check=health
            and ecs.HealthCheck(
                command=["CMD", *health[0]],
                interval=Duration.seconds(10),
                timeout=Duration.seconds(8),
                retries=10,  # a failover of Valkey is no reason to replace a task
                start_period=Duration.seconds(health[1]),
            ),
        )
        container.add_mount_points(
            ecs.MountPoint(source_volume="keys", container_path="/keys", read_only=False),
            ecs.MountPoint(
                source_volume="authorities",
                container_path=RDS_AUTHORITIES.rpartition("/")[0],
                read_only=True,
            ),
        )
        return container


def image_of(repository: ecr.IRepository, tag: str) -> ecs.ContainerImage:
    return ecs.ContainerImage.from_ecr_repository(repository, tag)


def service(
    scope: Construct,
    task: ServerTask,
    cluster: ecs.ICluster,
    provider: ecs.CfnCapacityProvider,
    *,
    name: str,
    count: int | None = None,
    grace: Duration | None = None,
) -> ecs.Ec2Service:
    """Rolls at 100 to 200 %; a release whose tasks do not become healthy is rolled back by itself.

    `count`: only of a service that nothing scales. Each deployment would set the others back to it.
    """
    return ecs.Ec2Service(
        scope,
        "Service",
        service_name=name,
        cluster=cluster,
        task_definition=task.definition,
        desired_count=count,
        min_healthy_percent=100,
        max_healthy_percent=200,
        circuit_breaker=ecs.DeploymentCircuitBreaker(enable=True, rollback=True),
        capacity_provider_strategies=[
            ecs.CapacityProviderStrategy(capacity_provider=provider.ref, weight=1)
        ],
        placement_strategies=[
            ecs.PlacementStrategy.spread_across(ecs.BuiltInAttributes.AVAILABILITY_ZONE),
            ecs.PlacementStrategy.packed_by_memory(),
        ],
        health_check_grace_period=grace,
        propagate_tags=ecs.PropagatedTagSource.SERVICE,
        enable_ecs_managed_tags=True,
    )
