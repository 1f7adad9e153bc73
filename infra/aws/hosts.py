"""The ECS cluster and its two capacity providers on EC2:
hosts of servers, and hosts of user workers."""

from aws_cdk import Aws, Duration, Tags
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_secretsmanager as secrets
from constructs import Construct

from infra.aws.network import Network
from infra.aws.stages import AwsStage
from infra.launchers.docker.container import MAX_PIDS

#: The folder of the launch key on a worker host. The ECS task definition of workers mounts it from
#: there.
LAUNCH_KEY_FOLDER = "/etc/berth"
#: The folder of a server host that holds the authorities that signed RDS's certificates.
AUTHORITIES_FOLDER = "/etc/berth-rds"
#: The user that workers run as (infra/images/worker.Dockerfile).
WORKER_UID = 10002

#: Containers reach no credentials of their host: they are in bridge mode, one hop further than it
#: allows. The rule is made at each start of the agent, which comes after Docker's. The script
#: starts neither of them: their units wait for cloud-init, and so for the end of this script
#: (amazon-ecs-agent#1707).
_NO_METADATA = (
    "mkdir --parents /etc/systemd/system/ecs.service.d",
    "printf '[Service]\\nExecStartPre=/usr/sbin/iptables --wait --insert DOCKER-USER "
    "--in-interface docker+ "
    "--destination 169.254.169.254/32 --jump DROP\\n' > "
    "/etc/systemd/system/ecs.service.d/no-metadata.conf",
    "systemctl daemon-reload",
)


class Hosts(Construct):
    def __init__(
        self, scope: Construct, stage: AwsStage, network: Network, launch_key: secrets.ISecret
    ) -> None:
        super().__init__(scope, "Hosts")
        self._stage = stage
        self._network = network
        self.cluster = ecs.Cluster(
            self,
            "Cluster",
            cluster_name=f"berth-{stage.name}",
            vpc=network.vpc,
            container_insights_v2=ecs.ContainerInsights.ENABLED,
        )
        servers = self._group(
            "Servers",
            stage.api_host,
            network.servers,
            min_hosts=2 if stage.standby else 1,
            max_hosts=stage.api_hosts_most,
            commands=[
                f"install --directory --mode=0755 {AUTHORITIES_FOLDER}",
                "curl --fail --silent --show-error --retry 5 --output "
                f"{AUTHORITIES_FOLDER}/authorities.pem "
                f"https://truststore.pki.rds.amazonaws.com/{stage.region}/{stage.region}-bundle.pem",
            ],
            rolls=True,
        )
        workers = self._group(
            "Workers",
            stage.worker_host,
            network.workers,
            min_hosts=stage.worker_hosts_least,
            max_hosts=stage.worker_hosts_most,
            commands=[
                "dnf install --assumeyes awscli-2",
                f"install --directory --mode=0755 {LAUNCH_KEY_FOLDER}",
                "umask 077",
                # The first host of a stage is there before `prepare` has made the key.
                f"until aws secretsmanager get-secret-value --region {stage.region} --query "
                "SecretString "
                f"--output text --secret-id {launch_key.secret_arn} | python3 -c "
                "'import json, sys; "
                'sys.stdout.write(json.load(sys.stdin)["launch-document.key"])\' '
                f"> {LAUNCH_KEY_FOLDER}/launch-document.key; do sleep 10; done",
                f"chown {WORKER_UID} {LAUNCH_KEY_FOLDER}/launch-document.key",
                # By default none: a fork bomb of one worker
                # would take the host from its 29 neighbours.
                f"echo ECS_TASK_PIDS_LIMIT={MAX_PIDS} >> /etc/ecs/ecs.config",
            ],
            rolls=False,
        )
        launch_key.grant_read(workers.role)
        self.servers = self._provider("Servers", servers, 100)
        #: The orchestrators set it and the group's minimum
        #: (`infra/hosts/ecs.py`): this is where they begin.
        self.workers = self._provider("Workers", workers, 90)
        self.workers_group = workers
        self.joined = ecs.CfnClusterCapacityProviderAssociations(
            self,
            "Providers",
            cluster=self.cluster.cluster_name,
            capacity_providers=[self.servers.ref, self.workers.ref, "FARGATE"],
            default_capacity_provider_strategy=[],
        )
        #: The same cluster, for services: CDK knows no hosts of ours.
        self.services_cluster = ecs.Cluster.from_cluster_attributes(
            self,
            "ServicesCluster",
            cluster_name=self.cluster.cluster_name,
            vpc=network.vpc,
            security_groups=[],
        )

    def _group(
        self,
        name: str,
        kind: str,
        security_group: ec2.ISecurityGroup,
        *,
        min_hosts: int,
        max_hosts: int,
        commands: list[str],
        rolls: bool,
    ) -> autoscaling.AutoScalingGroup:
        """Creates a group of hosts. With `rolls`, a deployment with a newer AMI replaces them.
        Hosts of workers stay: users trade there."""
        role = iam.Role(
            self,
            f"{name}Role",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
            description=f"Berth: hosts of {name.lower()}",
        )
        start = ec2.UserData.for_linux()
        start.add_commands("set -euo pipefail", *_NO_METADATA, *commands)
        # Last: a host that has not all it needs joins no cluster.
        start.add_commands(
            f"echo ECS_CLUSTER={self.cluster.cluster_name} >> /etc/ecs/ecs.config",
            "echo ECS_ENABLE_SPOT_INSTANCE_DRAINING=false >> /etc/ecs/ecs.config",
            "echo ECS_CONTAINER_STOP_TIMEOUT=120s >> /etc/ecs/ecs.config",
            "echo ECS_IMAGE_PULL_BEHAVIOR=prefer-cached >> /etc/ecs/ecs.config",
        )
        template = ec2.LaunchTemplate(
            self,
            f"{name}Template",
            instance_type=ec2.InstanceType(kind),
            machine_image=ecs.EcsOptimizedImage.amazon_linux2023(ecs.AmiHardwareType.STANDARD),
            role=role,
            security_group=security_group,
            user_data=start,
            require_imdsv2=True,
            http_put_response_hop_limit=1,
            detailed_monitoring=True,
            block_devices=[
                ec2.BlockDevice(
                    device_name="/dev/xvda",
                    volume=ec2.BlockDeviceVolume.ebs(
                        50, encrypted=True, volume_type=ec2.EbsDeviceVolumeType.GP3
                    ),
                )
            ],
        )
        group = autoscaling.AutoScalingGroup(
            self,
            f"{name}Group",
            vpc=self._network.vpc,
            vpc_subnets=self._network.hosts,
            launch_template=template,
            min_capacity=min_hosts,
            max_capacity=max_hosts,
            new_instances_protected_from_scale_in=True,
            group_metrics=[autoscaling.GroupMetrics.all()],
            update_policy=autoscaling.UpdatePolicy.rolling_update(
                min_instances_in_service=min_hosts, pause_time=Duration.minutes(5)
            )
            if rolls
            else None,
        )
        Tags.of(group).add("Name", f"berth-{self._stage.name}-{name.lower()}")
        # Each action named: AmazonEC2ContainerServiceforEC2Role allows more.
        cluster, region, account = self.cluster.cluster_arn, Aws.REGION, Aws.ACCOUNT_ID
        instances = (
            f"arn:{Aws.PARTITION}:ecs:{region}:{account}:"
            f"container-instance/{self.cluster.cluster_name}/*"
        )
        role.add_to_policy(
            iam.PolicyStatement(
                actions=["ecs:RegisterContainerInstance", "ecs:DeregisterContainerInstance"],
                resources=[cluster],
            )
        )
        role.add_to_policy(
            iam.PolicyStatement(
                actions=[
                    "ecs:Poll",
                    "ecs:StartTelemetrySession",
                    "ecs:SubmitContainerStateChange",
                    "ecs:SubmitTaskStateChange",
                    "ecs:SubmitAttachmentStateChanges",
                    "ecs:UpdateContainerInstancesState",
                ],
                resources=[cluster, instances],
            )
        )
        role.add_to_policy(
            iam.PolicyStatement(actions=["ecs:DiscoverPollEndpoint"], resources=["*"])
        )
        return group

    def _provider(
        self, name: str, group: autoscaling.AutoScalingGroup, target: int
    ) -> ecs.CfnCapacityProvider:
        """Creates a capacity provider with managed scaling, draining, protection. CDK's own class
        would give the hosts' role more rights."""
        parts = ecs.CfnCapacityProvider
        return parts(
            self,
            f"{name}Provider",
            name=f"berth-{self._stage.name}-{name.lower()}",
            auto_scaling_group_provider=parts.AutoScalingGroupProviderProperty(
                auto_scaling_group_arn=group.auto_scaling_group_name,
                managed_draining="ENABLED",
                managed_termination_protection="ENABLED",
                managed_scaling=parts.ManagedScalingProperty(
                    status="ENABLED",
                    target_capacity=target,
                    minimum_scaling_step_size=1,
                    maximum_scaling_step_size=20,
                    instance_warmup_period=60,
                ),
            ),
        )


def log_group(
    scope: Construct, name: str, stage: AwsStage, key: kms.IKey, path: str = ""
) -> logs.LogGroup:
    """Creates an encrypted log group, kept for the stage's days. `path` is another name in
    CloudWatch than ours."""
    return logs.LogGroup(
        scope,
        name,
        log_group_name=path or f"/berth/{stage.name}/{name.lower()}",
        encryption_key=key,
        retention={14: logs.RetentionDays.TWO_WEEKS, 90: logs.RetentionDays.THREE_MONTHS}[
            stage.log_days
        ],
        removal_policy=stage.removal,
    )
