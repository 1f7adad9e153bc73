"""API behind its load balancer, orchestrators,
fleets of job runners, and the task that comes before them."""

from pathlib import Path
from typing import Any

from aws_cdk import Aws, CustomResource, Duration
from aws_cdk import aws_applicationautoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_elasticloadbalancingv2 as elb
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_lambda as functions
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.aws.data import Storage
from infra.aws.hosts import Hosts, log_group
from infra.aws.network import Network
from infra.aws.stages import AwsStage, JobTier
from infra.aws.tasks import ServerSpec, ServerTask, TaskSize, service
from infra.aws.workers import WorkerTasks
from infra.jobs.scaling import WAITED_EVENT

#: Targets of the API's scaling, and its two pauses.
CPU_TARGET_PERCENT, REQUESTS_PER_MINUTE = 70, 1000
SCALE_OUT_COOLDOWN, SCALE_IN_COOLDOWN = Duration.seconds(60), Duration.seconds(300)
#: Seconds that a job waits until its fleet gets another task.
#: From 5 s on it has more runners (`jobs_wait`).
MAX_JOB_WAIT_S = 30
#: The time in which a task that leaves may finish its requests.
DRAIN_TIMEOUT = Duration.seconds(300)
API_PORT = 8000
#: The job runners' part of the message secret, and the folder of the secrets that a tier needs.
JOBS_KEY = "/keys/fleet/fleet.key"
PROVIDER_FOLDERS = {
    "webhook": ("webhook",),
    "email": ("email",),
    "sms": ("messaging",),
    "whatsapp": ("messaging",),
    "push": ("push",),
}
_HEALTH = ("python", "-m", "infra.compose.health")


class Servers:
    """Holds what all servers are made of; `add` makes one."""

    def __init__(
        self,
        scope: Construct,
        stage: AwsStage,
        storage: Storage,
        hosts: Hosts,
        key: kms.IKey,
        image_tag: str,
        temporal: dict[str, Any],
    ) -> None:
        """Takes `temporal`, the settings of the way to it."""
        self.scope = scope
        self.stage = stage
        self.storage = storage
        self.hosts = hosts
        self.key = key
        self.image_tag = image_tag
        self.temporal = {**temporal, "temporal_codec_key_file": "/keys/codec/temporal.key"}
        self.logs: list[logs.LogGroup] = []
        self._services: list[ecs.Ec2Service] = []

    @property
    def common(self) -> dict[str, Any]:
        """Settings of every server."""
        # No paper exchange: users have real brokers.
        common = {"log_level": "INFO", "exchange_address": "", "data_dir": "/tmp"}
        return {**common, "message_key_file": "/keys/messages/message.key"}

    def task(self, spec: ServerSpec, **options: Any) -> ServerTask:
        made = ServerTask(
            self.scope, self.stage, self.storage, self.key, self.image_tag, spec, **options
        )
        self.logs.append(made.log)
        return made

    def serve(self, task: ServerTask, name: str, **options: Any) -> ecs.Ec2Service:
        hosts = self.hosts
        made = service(task, task, hosts.services_cluster, hosts.servers, name=name, **options)
        self._services.append(made)
        return made

    def start_after(self, done: Construct) -> None:
        """Lets no service change before `done` has succeeded."""
        for ecs_service in self._services:
            ecs_service.node.add_dependency(done)


def prepare(servers: Servers) -> CustomResource:
    """Creates the task that makes keys, tables and the first administrator's key; run before the
    services change."""
    storage = servers.storage
    login = {name: v for name, v in servers.temporal.items() if name.startswith("temporal_")}
    if servers.stage.temporal_cloud:  # whose login comes from Temporal, not from us
        login.pop("temporal_api_key_file", None)
    task = servers.task(
        ServerSpec(
            name="prepare",
            command=("python", "-m", "infra.compose.prepare"),
            size=TaskSize(cpu=128, soft=256, hard=512),
            settings={
                **servers.common,
                **login,
                "launcher": "ecs",
                "master_kms_key": storage.master_key.key_arn,
                "master_key_file": "/keys/admin/master.key",  # never made; the API key is there too
                "orchestrator_key_dir": "/keys/private",
                "api_secret_file": "/keys/api/api.key",
                "webhook_key_file": "/keys/webhook/webhook.key",
                "jobs_key_file": JOBS_KEY,
                "ecs_launch_key_file": "/keys/launch/launch-document.key",
            },
            secrets={
                "database_owner_url": storage.database_owner_url,
                "database_url": storage.database_url,
                "valkey_url": storage.valkey_url,
            },
            folders=tuple(storage.folders),
            health=(),
        ),
        changes_keys=True,
    )
    runner = iam.Role(
        servers.scope,
        "PrepareRunner",
        assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"),
        description="Berth: runs the task `prepare`",
    )
    log = log_group(servers.scope, "prepare-runner", servers.stage, servers.key)
    log.grant_write(runner)
    cluster = servers.hosts.cluster
    runner.add_to_policy(
        iam.PolicyStatement(
            actions=["ecs:RunTask"],
            resources=[task.definition.task_definition_arn],
            conditions={"ArnEquals": {"ecs:cluster": cluster.cluster_arn}},
        )
    )
    runner.add_to_policy(
        iam.PolicyStatement(
            actions=["ecs:DescribeTasks"], resources=[tasks_of(cluster.cluster_name)]
        )
    )
    _pass_roles(runner, task.definition)
    function = functions.Function(
        servers.scope,
        "PrepareFunction",
        runtime=functions.Runtime.PYTHON_3_14,
        handler="index.handler",
        code=functions.Code.from_inline(
            Path(__file__).with_name("run_prepare.py").read_text("utf-8")
        ),
        timeout=Duration.minutes(15),
        memory_size=256,
        role=runner,
        log_group=log,
    )
    done = CustomResource(
        servers.scope,
        "Prepared",
        service_token=function.function_arn,
        resource_type="Custom::BerthPrepared",
        properties={
            "Cluster": cluster.cluster_arn,
            "TaskDefinition": task.definition.task_definition_arn,
            "CapacityProvider": servers.hosts.servers.ref,
        },
    )
    done.node.add_dependency(servers.hosts.joined, runner)
    return done


def tasks_of(cluster_name: str) -> str:
    return f"arn:{Aws.PARTITION}:ecs:{Aws.REGION}:{Aws.ACCOUNT_ID}:task/{cluster_name}/*"


def _pass_roles(role: iam.Role, definition: ecs.TaskDefinition) -> None:
    role.add_to_policy(
        iam.PolicyStatement(
            actions=["iam:PassRole"],
            resources=[definition.task_role.role_arn, definition.obtain_execution_role().role_arn],
            conditions={"StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}},
        )
    )


def add_api(
    servers: Servers, network: Network, certificate: str, access_logs: s3.IBucket
) -> elb.ApplicationLoadBalancer:
    """Adds the API: rolling deploys, 300 s to drain, scaled by CPU and requests. Returns its load
    balancer."""
    stage, storage = servers.stage, servers.storage
    public = [subnet.ipv4_cidr_block for subnet in network.vpc.public_subnets]
    task = servers.task(
        ServerSpec(
            name="api",
            command=("python", "-m", "api"),
            size=TaskSize(cpu=1024, soft=1536, hard=3072),
            settings={
                **servers.common,
                **servers.temporal,
                "api_host": "0.0.0.0",  # noqa: S104 - in its container
                "api_port": API_PORT,
                "api_processes": 2,
                "api_secret_file": "/keys/api/api.key",
                "master_kms_key": storage.master_key.key_arn,
                "trusted_proxies": public,
                "webhook_key_file": "/keys/webhook/webhook.key",
            },
            secrets={"database_url": storage.database_url, "valkey_url": storage.valkey_url},
            folders=("messages", "api", "codec", "login"),
            health=(*_HEALTH, "http", f"http://127.0.0.1:{API_PORT}/v1/healthz"),
            port=API_PORT,
        )
    )
    storage.master_key.grant(task.role, "kms:Encrypt")
    api = servers.serve(task, "api", grace=Duration.seconds(120))
    balancer = elb.ApplicationLoadBalancer(
        servers.scope,
        "Balancer",
        vpc=network.vpc,
        internet_facing=True,
        security_group=network.balancer,
        vpc_subnets=ec2.SubnetSelection(subnet_group_name="public"),
        deletion_protection=stage.keep_data,
        drop_invalid_header_fields=True,
        # Above the 15 s of event streams' heartbeats and below BERTH_API_KEEP_ALIVE: it would send
        # requests into connections that the API is closing.
        idle_timeout=Duration.seconds(60),
    )
    # Access logs would hold each webhook's token, which is part of its path, and cannot
    # leave it out. The API's own log has every request without the token; who connected
    # by TLS, and how, is here.
    balancer.log_connection_logs(access_logs, "api")
    listener = balancer.add_listener(
        "Https",
        port=443,
        protocol=elb.ApplicationProtocol.HTTPS,
        certificates=[elb.ListenerCertificate.from_arn(certificate)],
        ssl_policy=elb.SslPolicy.TLS13_RES,
        open=False,
    )
    target = listener.add_targets(
        "Api",
        port=API_PORT,
        protocol=elb.ApplicationProtocol.HTTP,
        targets=[api],
        deregistration_delay=DRAIN_TIMEOUT,
        load_balancing_algorithm_type=elb.TargetGroupLoadBalancingAlgorithmType.LEAST_OUTSTANDING_REQUESTS,
        health_check=elb.HealthCheck(
            # ECS replaces tasks that fail it: no cure for a server that all of them miss.
            path="/v1/healthz",
            port="traffic-port",
            interval=Duration.seconds(10),
            timeout=Duration.seconds(5),
            healthy_threshold_count=2,
            unhealthy_threshold_count=3,
        ),
    )
    scaling = api.auto_scale_task_count(
        min_capacity=stage.api_tasks, max_capacity=stage.api_tasks_most
    )
    pauses = {"scale_out_cooldown": SCALE_OUT_COOLDOWN, "scale_in_cooldown": SCALE_IN_COOLDOWN}
    scaling.scale_on_cpu_utilization("Cpu", target_utilization_percent=CPU_TARGET_PERCENT, **pauses)
    scaling.scale_on_request_count(
        "Requests", target_group=target, requests_per_target=REQUESTS_PER_MINUTE, **pauses
    )
    return balancer


def add_orchestrators(
    servers: Servers, workers: WorkerTasks, events: sqs.IQueue, egress: str
) -> ServerTask:
    """Adds orchestrators, which launch, list and stop workers, and set the number of their
    hosts."""
    stage, storage, hosts = servers.stage, servers.storage, servers.hosts
    task = servers.task(
        ServerSpec(
            name="orchestrator",
            command=("python", "-m", "activities"),
            size=TaskSize(cpu=512, soft=768, hard=1536),
            settings={
                **servers.common,
                **servers.temporal,
                "master_kms_key": storage.master_key.key_arn,
                "orchestrator_key_dir": "/keys/private",
                "webhook_key_file": "/keys/webhook/webhook.key",
                "pool_target": stage.pool_target,
                "valkey_users": storage.valkey.has_users,
                "egress_address": egress,
                "launcher": "ecs",
                "ecs_region": stage.region,
                "ecs_cluster": hosts.cluster.cluster_name,
                "ecs_task_definition": workers.family,
                "ecs_container": workers.CONTAINER,
                "ecs_capacity_providers": {hosts.workers.ref: 1},
                "ecs_host_provider": hosts.workers.ref,
                "ecs_hosts_warm": stage.worker_hosts_warm,
                "ecs_queue_url": events.queue_url,
                "ecs_launch_key_file": "/keys/launch/launch-document.key",
            },
            secrets={
                "database_url": storage.database_url,
                "valkey_url": storage.valkey_url,
                "worker_valkey_url": storage.worker_valkey_url,
            },
            folders=("private", "messages", "codec", "login", "launch"),
            health=(*_HEALTH, "poller", "berth-lifecycle"),
            start=120,
        )
    )
    storage.master_key.grant(task.role, "kms:Decrypt")
    events.grant_consume_messages(task.role)
    allow_launches(task.role, hosts, workers)
    servers.serve(task, "orchestrator", count=stage.orchestrators)
    return task


def allow_launches(role: iam.Role, hosts: Hosts, workers: WorkerTasks) -> None:
    """Allows what `infra/launchers/ecs` and `infra/hosts/ecs.py` call, and nothing else."""
    name, arn = hosts.cluster.cluster_name, hosts.cluster.cluster_arn
    here = f"arn:{Aws.PARTITION}:ecs:{Aws.REGION}:{Aws.ACCOUNT_ID}"
    in_cluster = {"ArnEquals": {"ecs:cluster": arn}}
    tasks = tasks_of(name)
    provider = f"{here}:capacity-provider/{hosts.workers.ref}"
    group = hosts.workers_group
    statements: list[tuple[list[str], list[str], dict[str, Any]]] = [
        (["ecs:RunTask"], [f"{here}:task-definition/{workers.family}:*"], in_cluster),
        (["ecs:StopTask", "ecs:DescribeTasks"], [tasks], in_cluster),
        (["ecs:TagResource"], [tasks], {"StringEquals": {"ecs:CreateAction": "RunTask"}}),
        (["ecs:ListTasks"], ["*"], in_cluster),  # its resource would be a host
        (["ecs:ListContainerInstances"], [arn], {}),
        (["ecs:DescribeContainerInstances"], [f"{here}:container-instance/{name}/*"], {}),
        (["ecs:DescribeCapacityProviders", "ecs:UpdateCapacityProvider"], [provider], {}),
        (["autoscaling:DescribeAutoScalingGroups"], ["*"], {}),  # it knows no resources
        (["autoscaling:UpdateAutoScalingGroup"], [group.auto_scaling_group_arn], {}),
        (
            ["iam:PassRole"],
            [workers.execution.role_arn],
            {"StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}},
        ),
    ]
    for actions, resources, conditions in statements:
        role.add_to_policy(
            iam.PolicyStatement(actions=actions, resources=resources, conditions=conditions or None)
        )


def add_job_fleet(servers: Servers, name: str, tier: JobTier) -> None:
    """Adds the runners of one queue, scaled by how long its jobs wait: first in a task, then by
    more tasks.

    Each fleet logs that once a minute (`infra/jobs/scaling.py`);
    CloudWatch makes a figure of these lines.
    """
    task = servers.task(
        ServerSpec(
            name=f"jobs-{name}",
            command=("python", "-m", "infra.jobs.fleet"),
            size=TaskSize(cpu=256, soft=256, hard=768),
            settings={
                **{
                    name: value
                    for name, value in servers.common.items()
                    if name != "message_key_file"
                },
                "jobs_key_file": JOBS_KEY,
                "valkey_users": servers.storage.valkey.has_users,
                "jobs_runner": name,
                "jobs_queues": [name],
                "jobs_slots": tier.slots,
                "jobs_runners": tier.runners,
                **({"webhook_key_file": "/keys/webhook/webhook.key"} if name == "webhook" else {}),
            },
            secrets={"valkey_url": servers.storage.jobs_valkey_url},
            folders=("fleet", *PROVIDER_FOLDERS.get(name, ())),
            health=(*_HEALTH, "runner", name),
            stop=120,
        )
    )
    fleet = servers.serve(task, f"jobs-{name}")
    waited = task.log.add_metric_filter(
        "Waited",
        filter_pattern=logs.FilterPattern.string_value("$.event", "=", WAITED_EVENT),
        metric_namespace="Berth",
        metric_name=f"{servers.stage.name}-jobs-{name}-waited",
        metric_value="$.seconds",
    ).metric(statistic="Maximum", period=Duration.minutes(1))
    scaling = fleet.auto_scale_task_count(min_capacity=tier.least, max_capacity=tier.most)
    scaling.scale_on_metric(
        "Waited",
        metric=waited,
        scaling_steps=[
            autoscaling.ScalingInterval(upper=1, change=-1),
            autoscaling.ScalingInterval(lower=MAX_JOB_WAIT_S, change=1),
            autoscaling.ScalingInterval(lower=4 * MAX_JOB_WAIT_S, change=2),
        ],
        cooldown=SCALE_IN_COOLDOWN,
    )
