"""Valkey: on a host of our own, with a user for each worker,
or ElastiCache, which has no such users.

The Auto Scaling group replaces a host that is lost. The data are on a volume that one host at a
time can attach, so there are never two servers. Clients follow the name of a load balancer, which
ends their TLS with a certificate of ACM and opens a TLS connection of its own to the host.
"""

from dataclasses import dataclass
from pathlib import Path

from aws_cdk import Aws, CfnDeletionPolicy, CfnTag, Duration, RemovalPolicy, Size, Tags
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_dlm as dlm
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_elasticache as elasticache
from aws_cdk import aws_elasticloadbalancingv2 as elb
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_route53 as route53
from aws_cdk import aws_route53_targets as route53_targets
from constructs import Construct

from infra.aws.hosts import log_group
from infra.aws.logins import password, password_of
from infra.aws.network import VALKEY_PORT, Network
from infra.aws.stages import AwsStage
from infra.valkey.job_users import JOB_COMMANDS
from infra.valkey.worker_users import COMMANDS
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys

#: The rights of all workers on ElastiCache, where nobody may make Valkey users by ACL SETUSER:
#: the commands of a worker's own user on every key, and scripts that the orchestrators have
#: loaded. No EVAL, with which an endless loop blocks everybody. No KEYS, SCAN, FLUSHALL,
#: CONFIG, CLIENT, ACL or MONITOR.
WORKER_ACCESS = " ".join(
    ("on", "~*", "&*", "-@all", *(f"+{command}" for command in COMMANDS), "+subscribe", "+evalsha")
)
#: The rights of the job runners on ElastiCache:
#: the keys of the fleet's jobs, and errors for operators.
JOBS_ACCESS = " ".join(
    (
        f"on ~{job_keys.every_key(job_keys.FLEET_TAG)} ~{keys.ERRORS}",
        f"&{job_keys.done(job_keys.FLEET_TAG, '*')} -@all",
        *(f"+{command}" for command in JOB_COMMANDS),
    )
)
SERVICE_ACCESS = "on ~* &* +@all -@dangerous +info +keys +client|id"

#: The tag of the host and of the volume that it may attach,
#: and the folder where the volume is mounted.
VOLUME_TAG, VOLUME_FOLDER = "berth:valkey", "/var/lib/berth-valkey"
#: The user that Valkey runs as in its image, and the tag of that image.
VALKEY_UID, VALKEY_IMAGE = 999, "9.1.2"
#: Percent of the host's memory. Rewriting the append-only file copies what is written meanwhile.
MEMORY_PERCENT = 60
#: Hours between two snapshots of the volume, and how many are kept.
SNAPSHOT_INTERVAL_HOURS, MAX_SNAPSHOTS_KEPT = 1, 48
_COMPOSE_CONF = Path(__file__).parents[1] / "compose" / "valkey.conf"


@dataclass(frozen=True, kw_only=True)
class ValkeyParts:
    """Addresses of a Valkey, and what the alarms watch."""

    url: str
    worker_url: str
    #: The URL of the job runners; with `has_users` the same as the workers': each derives its
    #: login.
    jobs_url: str
    #: True if each worker gets a Valkey user of its own.
    has_users: bool
    alarm_metric: cloudwatch.IMetric
    #: Exactly one of the two bounds is set.
    alarm_above: float | None = None
    alarm_below: float | None = None
    #: True if a metric without figures is an alarm, too.
    alarm_without_figures: bool = False
    alarm_text: str
    graphs: tuple[cloudwatch.IMetric, ...]


def add_elasticache(
    scope: Construct, stage: AwsStage, network: Network, key: kms.IKey
) -> ValkeyParts:
    """Adds one shard with TLS and two logins. No cluster: our scripts use keys of several slots."""
    logins = {
        name: password(scope, f"Valkey{name.title()}", name, stage.removal) for name in _LOGINS
    }
    access = {"service": SERVICE_ACCESS, "worker": WORKER_ACCESS, "jobs": JOBS_ACCESS}
    users = [
        elasticache.CfnUser(
            scope,
            f"Valkey{name.title()}User",
            engine="valkey",
            user_id=f"berth-{stage.name}-{name}",
            user_name=name,
            access_string=access[name],
            authentication_mode={"Type": "password", "Passwords": [password_of(login)]},
        )
        for name, login in logins.items()
    ]
    group = elasticache.CfnUserGroup(
        scope,
        "ValkeyUsers",
        engine="valkey",
        user_group_id=f"berth-{stage.name}",
        user_ids=[user.ref for user in users],
    )
    parameters = elasticache.CfnParameterGroup(
        scope,
        "ValkeyParameters",
        cache_parameter_group_family="valkey8",
        description="Berth: never evict",
        properties={"maxmemory-policy": "noeviction"},
    )
    subnets = elasticache.CfnSubnetGroup(
        scope,
        "ValkeySubnets",
        description="Berth",
        subnet_ids=network.vpc.select_subnets(subnet_group_name="data").subnet_ids,
    )
    valkey = elasticache.CfnReplicationGroup(
        scope,
        "Valkey",
        replication_group_description=f"Berth, {stage.name}",
        engine="valkey",
        engine_version="8.1",
        cache_node_type=stage.valkey_class,
        num_node_groups=1,
        replicas_per_node_group=1 if stage.standby else 0,
        automatic_failover_enabled=stage.standby,
        multi_az_enabled=stage.standby,
        cluster_mode="disabled",
        cache_parameter_group_name=parameters.ref,
        cache_subnet_group_name=subnets.ref,
        security_group_ids=[network.valkey.security_group_id],
        port=VALKEY_PORT,
        transit_encryption_enabled=True,
        transit_encryption_mode="required",
        at_rest_encryption_enabled=True,
        kms_key_id=key.key_arn,
        user_group_ids=[group.ref],
        snapshot_retention_limit=1,
        auto_minor_version_upgrade=False,
    )
    if stage.keep_data:
        valkey.cfn_options.deletion_policy = CfnDeletionPolicy.SNAPSHOT
        valkey.cfn_options.update_replace_policy = CfnDeletionPolicy.SNAPSHOT
    place = f"{valkey.attr_primary_end_point_address}:{VALKEY_PORT}/0"
    # Amazon's own authorities signed its certificate: those of the system know them.
    urls = {name: f"rediss://{name}:{password_of(login)}@{place}" for name, login in logins.items()}
    memory, cpu = (
        cloudwatch.Metric(
            namespace="AWS/ElastiCache",
            metric_name=name,
            # The first node: there is one shard.
            dimensions_map={"CacheClusterId": f"{valkey.ref}-001"},
            statistic="Maximum",
            period=Duration.minutes(1),
        )
        for name in ("DatabaseMemoryUsagePercentage", "EngineCPUUtilization")
    )
    return ValkeyParts(
        url=urls["service"],
        worker_url=urls["worker"],
        jobs_url=urls["jobs"],
        has_users=False,
        alarm_metric=memory,
        alarm_above=75,
        alarm_text="Valkey is filling up; it evicts nothing and refuses writes when it is full",
        graphs=(cpu, memory),
    )


_LOGINS = ("service", "worker", "jobs")


def server_config() -> str:
    """Returns compose's configuration, with TLS in place of the plain port, and room for the
    workers of a whole fleet."""
    text = _COMPOSE_CONF.read_text("utf-8")
    for old, new in (
        ("port 6379\n", f"port 0\ntls-port {VALKEY_PORT}\ntls-auth-clients no\n"
                        "tls-cert-file /run/secrets/valkey.crt\n"
                        "tls-key-file /run/secrets/valkey.key\n"),
        ("maxmemory 1gb\n", "maxmemory MAXMEMORY\n"),
        ("maxclients 20000\n", "maxclients 60000\n"),
    ):  # fmt: skip
        if text.count(old) != 1:
            raise ValueError(f"valkey.conf has changed: {old!r} is not there once")
        text = text.replace(old, new)
    return text


def volume_name(stage: AwsStage) -> str:
    """Return the volume's name in the stack: another one for another zone or snapshot.

    CloudFormation changes neither of a volume that exists; by another name it makes a new one.
    """
    return f"Volume{stage.valkey_zone or ''}{stage.valkey_snapshot.removeprefix('snap-')}"


class ValkeyHost(Construct):
    """Runs Valkey on one host: its volume with hourly snapshots,
    and the name that clients follow."""

    def __init__(
        self,
        scope: Construct,
        stage: AwsStage,
        network: Network,
        key: kms.IKey,
        images: ecr.IRepository,
        *,
        name: str,
        certificate: str,
    ) -> None:
        """Takes `name`, which the ACM certificate with the ARN `certificate` covers. A private zone
        leads it to the load balancer."""
        super().__init__(scope, "ValkeyHost")
        self._stage = stage
        self._network = network
        self._login = password(self, "Login", "default", stage.removal)
        subnet = network.vpc.select_subnets(subnet_group_name="hosts").subnets[stage.valkey_zone]
        self._volume = ec2.Volume(
            self,
            volume_name(stage),
            availability_zone=subnet.availability_zone,
            size=Size.gibibytes(stage.valkey_gib),
            snapshot_id=stage.valkey_snapshot or None,
            volume_type=ec2.EbsDeviceVolumeType.GP3,
            encrypted=True,
            removal_policy=RemovalPolicy.SNAPSHOT if stage.keep_data else RemovalPolicy.DESTROY,
        )
        Tags.of(self._volume).add(VOLUME_TAG, stage.name)
        self._log = log_group(self, "valkey", stage, key)
        group = self._group(subnet, images)
        self._snapshots()
        target = elb.NetworkTargetGroup(
            self,
            "Server",
            vpc=network.vpc,
            port=VALKEY_PORT,
            protocol=elb.Protocol.TLS,
            targets=[group],
            deregistration_delay=Duration.seconds(0),
            connection_termination=True,
            health_check=elb.HealthCheck(
                protocol=elb.Protocol.TCP,
                interval=Duration.seconds(5),
                healthy_threshold_count=2,
                unhealthy_threshold_count=2,
            ),
        )
        self._balancer(name).add_listener(
            "Tls",
            port=VALKEY_PORT,
            protocol=elb.Protocol.TLS,
            certificates=[elb.ListenerCertificate.from_arn(certificate)],
            ssl_policy=elb.SslPolicy.TLS13_RES,
            default_target_groups=[target],
        )
        place = f"{name}:{VALKEY_PORT}/0"
        healthy = target.metrics.healthy_host_count(statistic="Minimum", period=Duration.minutes(1))
        self.parts = ValkeyParts(
            url=f"rediss://:{password_of(self._login)}@{place}",
            worker_url=f"rediss://{place}",  # the launch adds the worker's own name and password
            jobs_url=f"rediss://{place}",
            has_users=True,
            alarm_metric=healthy,
            alarm_below=1,
            alarm_without_figures=True,  # a balancer without any host reports none
            alarm_text="Valkey is away; its host is replaced by itself, a lost zone is not",
            graphs=(
                healthy,
                cloudwatch.Metric(
                    namespace="AWS/EC2",
                    metric_name="CPUUtilization",
                    dimensions_map={"AutoScalingGroupName": group.auto_scaling_group_name},
                    statistic="Maximum",
                    period=Duration.minutes(1),
                ),
            ),
        )

    def _group(self, subnet: ec2.ISubnet, images: ecr.IRepository) -> autoscaling.AutoScalingGroup:
        """Creates a group that always has one host. A deployment does not replace it: an operator
        does, at a quiet time."""
        nodes = ec2.SecurityGroup(
            self,
            "Hosts",
            vpc=self._network.vpc,
            description="Berth: host of Valkey",
            allow_all_outbound=False,
        )
        nodes.add_egress_rule(
            ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "AWS: image, password, volume, log"
        )
        nodes.add_ingress_rule(
            self._network.valkey, ec2.Port.tcp(VALKEY_PORT), "load balancer of Valkey"
        )
        self._network.valkey.add_egress_rule(nodes, ec2.Port.tcp(VALKEY_PORT), "host of Valkey")
        self._network.endpoints.add_ingress_rule(nodes, ec2.Port.tcp(443), "host of Valkey")
        role = iam.Role(
            self,
            "Role",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
            description=f"Berth, {self._stage.name}: host of Valkey",
        )
        images.grant_pull(role)
        self._login.grant_read(role)
        self._log.grant_write(role)
        here = f"arn:{Aws.PARTITION}:ec2:{Aws.REGION}:{Aws.ACCOUNT_ID}"
        role.add_to_policy(
            iam.PolicyStatement(
                actions=["ec2:AttachVolume"],
                resources=[f"{here}:volume/{self._volume.volume_id}", f"{here}:instance/*"],
                conditions={"StringEquals": {f"aws:ResourceTag/{VOLUME_TAG}": self._stage.name}},
            )
        )
        template = ec2.LaunchTemplate(
            self,
            "Template",
            instance_type=ec2.InstanceType(self._stage.valkey_host),
            machine_image=ec2.MachineImage.latest_amazon_linux2023(),
            role=role,
            security_group=nodes,
            user_data=self._start(images),
            require_imdsv2=True,
            http_put_response_hop_limit=1,
            detailed_monitoring=True,
            block_devices=[
                ec2.BlockDevice(
                    device_name="/dev/xvda",
                    volume=ec2.BlockDeviceVolume.ebs(
                        20, encrypted=True, volume_type=ec2.EbsDeviceVolumeType.GP3
                    ),
                )
            ],
        )
        group = autoscaling.AutoScalingGroup(
            self,
            "Group",
            vpc=self._network.vpc,
            vpc_subnets=ec2.SubnetSelection(subnets=[subnet]),
            launch_template=template,
            min_capacity=1,
            max_capacity=1,
            group_metrics=[autoscaling.GroupMetrics.all()],
        )
        group.node.add_dependency(role)  # and so on its policy
        Tags.of(group).add("Name", f"berth-{self._stage.name}-valkey")
        Tags.of(group).add(VOLUME_TAG, self._stage.name)
        return group

    def _start(self, images: ecr.IRepository) -> ec2.UserData:
        """Return what a new host does: packages, the volume,
        a certificate of its own, the image, Valkey."""
        region, volume = self._stage.region, self._volume.volume_id
        image = f"{images.repository_uri}:{VALKEY_IMAGE}"
        registry = f"{Aws.ACCOUNT_ID}.dkr.ecr.{region}.{Aws.URL_SUFFIX}"
        metadata = "http://169.254.169.254/latest"
        start = ec2.UserData.for_linux()
        start.add_commands(
            "set -euo pipefail",
            # A host that does not become one ends itself, and its group starts another one.
            "trap 'sleep 60; shutdown --poweroff now' ERR",
            "dnf install --assumeyes awscli-2 docker openssl xfsprogs",
            # The former host keeps the volume until it has ended, so this loop waits for its end.
            "token=$(curl --fail --silent --request PUT "
            f"--header 'X-aws-ec2-metadata-token-ttl-seconds: 300' {metadata}/api/token)",
            f'host=$(curl --fail --silent --header "X-aws-ec2-metadata-token: $token" '
            f"{metadata}/meta-data/instance-id)",
            f"volume={volume}",
            f'until aws ec2 attach-volume --region {region} --volume-id "$volume" '
            '--instance-id "$host" '
            "--device /dev/sdf; do sleep 5; done",
            "disk=/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_${volume/-/}",
            'until [ -e "$disk" ]; do sleep 1; done',
            # mkfs refuses a disk that already has a file system.
            'blkid --probe "$disk" || mkfs.xfs "$disk"',
            f"install --directory --mode=0755 {VOLUME_FOLDER}",
            f'echo "$disk {VOLUME_FOLDER} xfs nofail,x-systemd.before=docker.service 0 2" >> '
            "/etc/fstab",
            f"mount {VOLUME_FOLDER}",
            f"xfs_growfs {VOLUME_FOLDER}",  # of a volume that has been made larger
            f"install --directory --mode=0700 {VOLUME_FOLDER}/data",
            f"chown {VALKEY_UID}:{VALKEY_UID} {VOLUME_FOLDER}/data",
            # The configuration. The certificate is for the load balancer, which checks no names.
            "install --directory --mode=0755 /etc/berth-valkey /etc/berth-valkey/secrets",
            "memory=$(awk '/^MemTotal:/ {print $2}' /proc/meminfo)",  # KiB
            f"maxmemory=$((memory * 1024 * {MEMORY_PERCENT} / 100))",
            "cat > /etc/berth-valkey/valkey.conf <<'END'",
            *server_config().splitlines(),
            "END",
            'sed --in-place "s/MAXMEMORY/$maxmemory/" /etc/berth-valkey/valkey.conf',
            "umask 077",
            "cd /etc/berth-valkey/secrets",
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 "
            "-subj /CN=valkey -keyout valkey.key -out valkey.crt",
            f"until aws secretsmanager get-secret-value --region {region} --query SecretString "
            "--output text "
            f"--secret-id {self._login.secret_arn} | python3 -c 'import json, sys; "
            'sys.stdout.write("requirepass " + json.load(sys.stdin)["password"] + "\\n")\' '
            "> valkey_password.conf; do sleep 10; done",
            f"chown {VALKEY_UID}:{VALKEY_UID} valkey.key valkey.crt valkey_password.conf",
            # A server that uses more than half of the memory
            # forks when it rewrites its append-only file.
            "sysctl --write vm.overcommit_memory=1",
            "echo vm.overcommit_memory=1 > /etc/sysctl.d/90-berth-valkey.conf",
            "systemctl enable --now docker",
            # The first host of a stage is there before its image is pushed.
            f"until aws ecr get-login-password --region {region} | docker login --username AWS "
            f"--password-stdin {registry} && docker pull {image}; do sleep 10; done",
            # A mount of a folder that is missing fails: without its volume no server starts. In
            # bridge mode the container reaches no credentials of its host, which are one hop away.
            "docker run --detach --name valkey --restart always "
            f"--publish {VALKEY_PORT}:{VALKEY_PORT} --user {VALKEY_UID}:{VALKEY_UID} "
            "--cap-drop ALL --security-opt no-new-privileges --read-only --tmpfs /tmp "
            "--ulimit nofile=65536:65536 --stop-timeout 60 "
            f"--mount type=bind,src={VOLUME_FOLDER}/data,dst=/data "
            "--mount "
            "type=bind,src=/etc/berth-valkey/valkey.conf,dst=/etc/valkey/valkey.conf,readonly "
            "--mount type=bind,src=/etc/berth-valkey/secrets,dst=/run/secrets,readonly "
            f"--log-driver awslogs --log-opt awslogs-region={region} --log-opt mode=non-blocking "
            f'--log-opt awslogs-group={self._log.log_group_name} --log-opt awslogs-stream="$host" '
            f"{image} valkey-server /etc/valkey/valkey.conf",
        )
        return start

    def _snapshots(self) -> None:
        """Takes snapshots of the volume, each hour, for a lost zone or volume. A lost host needs
        none."""
        role = iam.Role(
            self,
            "SnapshotsRole",
            assumed_by=iam.ServicePrincipal("dlm.amazonaws.com"),
            description=f"Berth, {self._stage.name}: snapshots of Valkey's volume",
        )
        here = f"arn:{Aws.PARTITION}:ec2:{Aws.REGION}"
        snapshots = f"{here}::snapshot/*"
        volume = f"{here}:{Aws.ACCOUNT_ID}:volume/{self._volume.volume_id}"
        for actions, resources in (
            (["ec2:CreateSnapshot"], [volume, snapshots]),
            (["ec2:CreateTags"], [snapshots]),
            (["ec2:DescribeVolumes", "ec2:DescribeSnapshots", "ec2:DescribeTags"], ["*"]),
        ):
            role.add_to_policy(iam.PolicyStatement(actions=actions, resources=resources))
        role.add_to_policy(
            iam.PolicyStatement(
                actions=["ec2:DeleteSnapshot"],
                resources=[snapshots],
                conditions={"StringEquals": {f"aws:ResourceTag/{VOLUME_TAG}": self._stage.name}},
            )
        )
        policy = dlm.CfnLifecyclePolicy
        policy(
            self,
            "Snapshots",
            description=f"Berth {self._stage.name} Valkey",
            state="ENABLED",
            execution_role_arn=role.role_arn,
            policy_details=policy.PolicyDetailsProperty(
                policy_type="EBS_SNAPSHOT_MANAGEMENT",
                resource_types=["VOLUME"],
                target_tags=[CfnTag(key=VOLUME_TAG, value=self._stage.name)],
                schedules=[
                    policy.ScheduleProperty(
                        name="hourly",
                        copy_tags=True,
                        create_rule=policy.CreateRuleProperty(
                            interval=SNAPSHOT_INTERVAL_HOURS, interval_unit="HOURS"
                        ),
                        retain_rule=policy.RetainRuleProperty(count=MAX_SNAPSHOTS_KEPT),
                    )
                ],
            ),
        )

    def _balancer(self, name: str) -> elb.NetworkLoadBalancer:
        """Creates a balancer that only servers and workers reach (`Network.valkey`)."""
        balancer = elb.NetworkLoadBalancer(
            self,
            "Balancer",
            vpc=self._network.vpc,
            internet_facing=False,
            vpc_subnets=self._network.hosts,
            security_groups=[self._network.valkey],
            cross_zone_enabled=True,
            deletion_protection=self._stage.keep_data,
        )
        zone = route53.PrivateHostedZone(self, "Zone", zone_name=name, vpc=self._network.vpc)
        route53.ARecord(
            self,
            "Name",
            zone=zone,
            target=route53.RecordTarget.from_alias(route53_targets.LoadBalancerTarget(balancer)),
        )
        return balancer
