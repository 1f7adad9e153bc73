"""User workers as tasks: on our own hosts in bridge mode, and on Fargate.

They have no role: a worker calls Valkey and its broker, and nothing of AWS (ADR 0012).
"""

from typing import Any

from aws_cdk import Aws
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from constructs import Construct

from infra.aws.data import Storage
from infra.aws.hosts import LAUNCH_KEY_FOLDER, WORKER_UID, log_group
from infra.aws.stages import AwsStage
from infra.worker_task import CPU_UNITS, MEMORY_HARD_BYTES, MEMORY_SOFT_BYTES

_MIB = 1024 * 1024
#: Seconds from SIGTERM to SIGKILL, as the launcher expects.
STOP_TIMEOUT_S = 15
#: Fargate's smallest size with the worker's memory: CPU units, MiB.
FARGATE = ("256", "2048")


class WorkerTasks(Construct):
    CONTAINER = "worker"

    def __init__(
        self, scope: Construct, stage: AwsStage, storage: Storage, key: kms.IKey, image_tag: str
    ) -> None:
        super().__init__(scope, "WorkerTasks")
        self.family = f"berth-{stage.name}-worker"
        self._log = log_group(self, "worker", stage, key)
        self._region = stage.region
        images = storage.images["worker"]
        self._image = images.repository_uri_for_tag(image_tag)
        self.execution = self._execution_role("worker tasks")
        images.grant_pull(self.execution)
        self._log.grant_write(self.execution)
        self.on_hosts = ecs.CfnTaskDefinition(
            self,
            "OnHosts",
            family=self.family,
            network_mode="bridge",
            requires_compatibilities=["EC2"],
            execution_role_arn=self.execution.role_arn,
            volumes=[
                ecs.CfnTaskDefinition.VolumeProperty(
                    name="launch-document-key",
                    host=ecs.CfnTaskDefinition.HostVolumePropertiesProperty(
                        source_path=LAUNCH_KEY_FOLDER
                    ),
                )
            ],
            container_definitions=[
                self._worker(
                    linux={
                        "initProcessEnabled": True,
                        "capabilities": {"drop": ["ALL"]},
                        "tmpfs": [
                            {"containerPath": "/tmp", "size": 128, "mountOptions": ["mode=1777"]}
                        ],
                    },
                    cpu=CPU_UNITS,
                    memory_reservation=MEMORY_SOFT_BYTES // _MIB,
                    memory=MEMORY_HARD_BYTES // _MIB,
                    docker_security_options=["no-new-privileges"],
                    mounts=[("launch-document-key", "/run/berth", True)],
                )
            ],
        )
        launch_key = storage.folders["launch"]
        fargate_role = self._execution_role("worker tasks on Fargate")
        images.grant_pull(fargate_role)
        self._log.grant_write(fargate_role)
        launch_key.grant_read(fargate_role)
        volumes = ("launch-document-key", "tmp")
        write = 'umask 077; printf %s "$LAUNCH_KEY" > /run/berth/launch-document.key; '
        write += f"chown {WORKER_UID} /run/berth/launch-document.key; chmod 1777 /tmp"
        self.on_fargate = ecs.CfnTaskDefinition(
            self,
            "OnFargate",
            family=f"{self.family}-fargate",
            network_mode="awsvpc",
            requires_compatibilities=["FARGATE"],
            cpu=FARGATE[0],
            memory=FARGATE[1],
            execution_role_arn=fargate_role.role_arn,
            volumes=[ecs.CfnTaskDefinition.VolumeProperty(name=name) for name in volumes],
            container_definitions=[
                ecs.CfnTaskDefinition.ContainerDefinitionProperty(
                    name="key",
                    image=self._image,
                    essential=False,
                    user="0",
                    entry_point=["sh", "-euc"],
                    command=[write],
                    secrets=[
                        ecs.CfnTaskDefinition.SecretProperty(
                            name="LAUNCH_KEY",
                            value_from=f"{launch_key.secret_arn}:launch-document.key::",
                        )
                    ],
                    readonly_root_filesystem=True,
                    log_configuration=self._logging("key"),
                    mount_points=_mounts(
                        [("launch-document-key", "/run/berth", False), ("tmp", "/tmp", False)]
                    ),
                ),
                self._worker(
                    linux={"initProcessEnabled": True, "capabilities": {"drop": ["ALL"]}},
                    mounts=[("launch-document-key", "/run/berth", True), ("tmp", "/tmp", False)],
                    depends_on=[
                        ecs.CfnTaskDefinition.ContainerDependencyProperty(
                            container_name="key", condition="SUCCESS"
                        )
                    ],
                ),
            ],
        )

    def _worker(
        self, *, linux: dict[str, Any], mounts: list[tuple[str, str, bool]], **options: Any
    ) -> ecs.CfnTaskDefinition.ContainerDefinitionProperty:
        return ecs.CfnTaskDefinition.ContainerDefinitionProperty(
            name=self.CONTAINER,
            image=self._image,
            essential=True,
            readonly_root_filesystem=True,
            stop_timeout=STOP_TIMEOUT_S,
            linux_parameters=linux,
            log_configuration=self._logging(self.CONTAINER),
            mount_points=_mounts(mounts),
            **options,
        )

    def _logging(self, prefix: str) -> ecs.CfnTaskDefinition.LogConfigurationProperty:
        return ecs.CfnTaskDefinition.LogConfigurationProperty(
            log_driver="awslogs",
            options={
                "awslogs-group": self._log.log_group_name,
                "awslogs-region": Aws.REGION,
                "awslogs-stream-prefix": prefix,
                # A worker continues when CloudWatch does not take its lines.
                "mode": "non-blocking",
                "max-buffer-size": "1m",
            },
        )

    def _execution_role(self, tasks: str) -> iam.Role:
        return iam.Role(
            self,
            "".join(word.title() for word in tasks.split()),
            assumed_by=iam.ServicePrincipal("ecs-tasks.amazonaws.com"),
            description=f"Berth: starts {tasks}; they have no role themselves",
        )


def _mounts(mounts: list[tuple[str, str, bool]]) -> list[ecs.CfnTaskDefinition.MountPointProperty]:
    return [
        ecs.CfnTaskDefinition.MountPointProperty(
            source_volume=name, container_path=path, read_only=fixed
        )
        for name, path, fixed in mounts
    ]
