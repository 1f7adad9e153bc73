"""`python -m infra.aws.app FOLDER`:
synthesises all stages into CloudFormation templates, without AWS.

Each stage is two stacks, since images come between them: `berth-<stage>-base` has what lasts and
the repositories, `berth-<stage>-servers` what runs.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Debian's Node is older than the one that jsii wants; what it says about that is no error.
os.environ.setdefault("JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION", "18,20,22")
os.environ.setdefault("JSII_SILENCE_WARNING_DEPRECATED_NODE_VERSION", "1")
os.environ.setdefault("JSII_SILENCE_WARNING_UNTESTED_NODE_VERSION", "1")

from aws_cdk import (
    App,
    Aspects,
    CfnOutput,
    CfnParameter,
    Duration,
    Environment,
    RemovalPolicy,
    Stack,
    Tags,
)
from aws_cdk import aws_s3 as s3
from cdk_nag import AwsSolutionsChecks, NagPackSuppression, NagSuppressions, RegexAppliesTo

from infra.aws import servers as parts
from infra.aws.data import Storage, data_key
from infra.aws.events import Alarms, TaskEvents
from infra.aws.hosts import Hosts
from infra.aws.network import Network
from infra.aws.servers import Servers
from infra.aws.stages import STAGES, AwsStage
from infra.aws.temporal import TemporalCluster, cloud_settings, own_settings
from infra.aws.workers import WorkerTasks

#: CDK's newer behaviour: no policy says a thing twice; the base keeps what the servers use.
_FLAGS = {
    "@aws-cdk/aws-iam:minimizePolicies": True,
    "@aws-cdk/core:defaultCrossStackReferences": "strong",
}


def text_parameter(stack: Stack, name: str, description: str, pattern: str) -> str:
    return CfnParameter(
        stack, name, description=description, allowed_pattern=pattern
    ).value_as_string


class BaseStack(Stack):
    """VPC, keys, PostgreSQL, Valkey, secrets, repositories."""

    def __init__(self, app: App, stage: AwsStage) -> None:
        name = f"berth-{stage.name}-base"
        super().__init__(
            app, name, env=Environment(region=stage.region), description="Berth: what lasts"
        )
        self.key = data_key(self, stage)
        self.network = Network(self, stage, self.key)
        valkey_name = valkey_certificate = ""
        if stage.own_valkey:
            valkey_name = text_parameter(
                self, "ValkeyName", "Name of our Valkey, inside the VPC", r"[a-z0-9.-]+"
            )
            valkey_certificate = text_parameter(
                self,
                "ValkeyCertificate",
                "ARN of the certificate for that name",
                r"arn:aws.*:acm:.+",
            )
        self.storage = Storage(
            self,
            stage,
            self.network,
            self.key,
            valkey_name=valkey_name,
            valkey_certificate=valkey_certificate,
        )
        for image, repository in self.storage.images.items():
            CfnOutput(self, f"{image.title()}Repository", value=repository.repository_uri)
        self.egress = [
            subnet.node.find_child("EIP")
            for subnet in self.network.vpc.public_subnets[: stage.nat_gateways]
        ]
        #: The address that brokers see, if it is one: budgets are counted for one address.
        self.egress_address = self.egress[0].ref if len(self.egress) == 1 else ""  # type: ignore[attr-defined]


class ServersStack(Stack):
    """The cluster, its hosts and services, queues and alarms."""

    def __init__(self, app: App, stage: AwsStage, base: BaseStack) -> None:
        name = f"berth-{stage.name}-servers"
        super().__init__(
            app, name, env=Environment(region=stage.region), description="Berth: what runs"
        )
        self.add_stack_dependency(base)
        tag = self._parameter(
            "ImageTag", "Tag of both images in the stage's repositories", r"[\w.-]{1,128}"
        )
        certificate = self._parameter(
            "Certificate", "ARN of the certificate for the API's name", r"arn:aws.*:acm:.+"
        )
        mail = self._parameter(
            "AlarmMail", "Who is called when an alarm goes off", r"[^@\s]+@[^@\s]+"
        )
        network, storage, key = base.network, base.storage, base.key
        hosts = Hosts(self, stage, network, storage.folders["launch"])
        if stage.temporal_cloud:
            address = self._parameter("TemporalAddress", "host:port of the namespace", r".+:\d+")
            namespace = self._parameter(
                "TemporalNamespace", "The namespace in Temporal Cloud", r".+"
            )
            way = cloud_settings(address, namespace)
        else:
            temporal_name = self._parameter(
                "TemporalName", "Name of our Temporal, inside the VPC", r"[a-z0-9.-]+"
            )
            way = own_settings(temporal_name)
        servers = Servers(self, stage, storage, hosts, key, tag, way)
        prepared = parts.prepare(servers)
        task_events = TaskEvents(self, hosts)
        workers = WorkerTasks(self, stage, storage, key, tag)
        access_logs = self._access_logs(stage)
        balancer = parts.add_api(servers, network, certificate, access_logs)
        parts.add_orchestrators(servers, workers, task_events.queue, base.egress_address)
        for tier_name, tier in stage.job_tiers.items():
            parts.add_job_fleet(servers, tier_name, tier)
        servers.start_after(prepared)
        if not stage.temporal_cloud:
            cluster = TemporalCluster(
                servers, network, access_logs, name=temporal_name, certificate=certificate
            )
            cluster.service.node.add_dependency(prepared)
            # Its database alone takes longer to make than an orchestrator may wait for it.
            servers.start_after(cluster)
        Alarms(
            self,
            stage,
            key,
            mail,
            task_events=task_events,
            storage=storage,
            balancer=balancer,
            server_logs=servers.logs,
            hosts=hosts,
        )
        CfnOutput(self, "ApiName", value=balancer.load_balancer_dns_name)
        CfnOutput(self, "AdminKey", value=f"berth/{stage.name}/admin")

    def _parameter(self, name: str, description: str, pattern: str) -> str:
        return text_parameter(self, name, description, pattern)

    def _access_logs(self, stage: AwsStage) -> s3.Bucket:
        return s3.Bucket(
            self,
            "AccessLogs",
            encryption=s3.BucketEncryption.S3_MANAGED,  # the only one that load balancers write to
            enforce_ssl=True,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            lifecycle_rules=[s3.LifecycleRule(expiration=Duration.days(stage.log_days))],
            removal_policy=RemovalPolicy.RETAIN_ON_UPDATE_OR_DELETE,
        )


# --- what cdk-nag would change and we do not, each with its reason

#: In every stage.
REASONS = {
    "AwsSolutions-SMG4": "keys have versions and are rotated by `berth keys rotate`; logins by "
    "a deployment",
    "AwsSolutions-ECS2": "settings that are no secrets; secrets come from Secrets Manager",
    "AwsSolutions-RDS11": "another port hides nothing: the security group admits our own "
    "servers only",
    "AwsSolutions-AEC6": "another port hides nothing: the security group admits our own hosts only",
    "AwsSolutions-EC23": "the API is public: port 443 of its load balancer",
    "AwsSolutions-AS3": "ECS changes the number of hosts all day; alarms say when something is "
    "wrong",
    "AwsSolutions-ELB2": "the API's would hold webhooks' tokens, in their paths; Valkey's is "
    "inside the VPC",
    "AwsSolutions-S1": "the bucket of access logs is the place where such logs go",
    "AwsSolutions-SQS3": "these two are dead-letter queues themselves",
}
#: Where a stage saves what another one needs.
WITHOUT_STANDBY = {
    "AwsSolutions-RDS3": "a stage for trials: one zone is enough",
    "AwsSolutions-AEC4": "a stage for trials: one zone is enough",
}
WITHOUT_KEPT_DATA = {"AwsSolutions-RDS10": "a stage for trials may be deleted"}
MANAGED = "RDS writes its own figures by the policy that AWS keeps for it"
WILDCARDS: dict[str, tuple[str, ...]] = {
    "these actions know no resource (logins at ECR, endpoints of ECS, listings); tests name "
    "each of them": ("/^Resource::\\*$/",),
    "of this cluster, task family or Auto Scaling group: the rest of the name is made when it "
    "starts": (
        "/^Resource::arn:<AWS::Partition>:ecs:.*:(task|container-instance)\\/<HostsCluster[A-Z0-9]+>\\/\\*$/",
        "/^Resource::arn:<AWS::Partition>:ecs:.*:task-definition\\/berth-[a-z]+-worker:\\*$/",
        "/^Resource::arn:<AWS::Partition>:autoscaling:.*:autoScalingGroup:\\*:.*<HostsWorkersGroupASG[A-Z0-9]+>$/",
    ),
    "instances and snapshots that do not exist yet; attaching and deleting needs the tag of "
    "this Valkey": (
        "/^Resource::arn:<AWS::Partition>:ec2:<AWS::Region>:<AWS::AccountId>:instance\\/\\*$/",
        "/^Resource::arn:<AWS::Partition>:ec2:<AWS::Region>::snapshot\\/\\*$/",
    ),
}


def explain(stack: Stack, stage: AwsStage) -> None:
    reasons = {
        **REASONS,
        **({} if stage.standby else WITHOUT_STANDBY),
        **({} if stage.keep_data else WITHOUT_KEPT_DATA),
    }
    suppressions = [NagPackSuppression(id=rule, reason=reason) for rule, reason in reasons.items()]
    policy = (
        "Policy::arn:<AWS::Partition>:iam::aws:policy/service-role/AmazonRDSEnhancedMonitoringRole"
    )
    suppressions.append(
        NagPackSuppression(id="AwsSolutions-IAM4", reason=MANAGED, applies_to=[policy])
    )
    suppressions += [
        NagPackSuppression(
            id="AwsSolutions-IAM5",
            reason=reason,
            applies_to=[RegexAppliesTo(regex=pattern) for pattern in patterns],
        )
        for reason, patterns in WILDCARDS.items()
    ]
    NagSuppressions.add_stack_suppressions(stack, suppressions)


def build(folder: Path, stages: Sequence[AwsStage] = STAGES) -> App:
    """Builds all stages, not yet synthesised."""
    app = App(outdir=str(folder), analytics_reporting=False, context=_FLAGS)
    for stage in stages:
        base = BaseStack(app, stage)
        servers = ServersStack(app, stage, base)
        for stack in (base, servers):
            Tags.of(stack).add("berth:stage", stage.name)
            explain(stack, stage)
    Aspects.of(app).add(AwsSolutionsChecks(verbose=True))
    return app


def main(words: list[str], stages: Sequence[AwsStage] = STAGES) -> int:
    folder = Path(words[0] if words else "infra/aws/cdk.out").absolute()
    assembly = build(folder, stages).synth()
    messages = [
        f"{stack.stack_name}: {message.entry.data}"
        for stack in assembly.stacks
        for message in stack.messages
        if message.level.name in ("ERROR", "WARNING")
    ]
    sys.stdout.writelines(f"{line}\n" for line in messages)
    sys.stdout.write(f"{len(assembly.stacks)} stacks in {folder}\n")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
