"""The stages and their figures. What an account alone knows is a parameter of its stack."""

from dataclasses import dataclass, field

from aws_cdk import RemovalPolicy


@dataclass(frozen=True, kw_only=True)
class JobTier:
    """A fleet of job runners of its own, so that a flood in one tier leaves the others alone.

    Both its runners and its tasks become more while its jobs wait.
    """

    #: Runners in one task, jobs at once in a runner (they wait for servers of others), and tasks.
    runners: str = "1-4"
    slots: int = 8
    least: int = 1
    most: int = 4


@dataclass(frozen=True, kw_only=True)
class AwsStage:
    name: str
    region: str = "ap-northeast-1"
    #: True if Temporal Cloud is used, False for a cluster of our own in this stage.
    temporal_cloud: bool
    #: Two availability zones; NAT gateways, each of which is an address that brokers see.
    zones: int = 2
    nat_gateways: int = 2
    cidr: str

    #: API: tasks of 1,024 CPU units and 1,536 MiB soft, 3,072 MiB hard; two fill an m6i.large.
    api_tasks: int = 2
    api_tasks_most: int = 8
    api_host: str = "m6i.large"
    #: API, orchestrators and job runners share these hosts.
    api_hosts_most: int = 12
    orchestrators: int = 2
    #: By the queue that each serves.
    job_tiers: dict[str, JobTier] = field(
        default_factory=lambda: {
            **{name: JobTier() for name in ("email", "webhook", "sms", "whatsapp", "push")},
            "default": JobTier(slots=4),
        }
    )

    #: Workers: 64 CPU units, 384 MiB soft, 1,024 MiB hard; 30 to an r6i.large.
    worker_host: str = "r6i.large"
    worker_hosts_least: int = 1
    worker_hosts_most: int = 400
    #: Spare hosts that are kept warm, since a cold one takes 48 to 63 s.
    worker_hosts_warm: int = 1
    pool_target: int = 30

    #: PostgreSQL and ElastiCache; both stand in two zones where `standby` is set.
    database_class: str = "m6g.large"
    database_gib: int = 100
    database_gib_most: int = 1000
    #: Days back to which PostgreSQL can be restored, to the second.
    restore_days: int = 14
    standby: bool = True
    #: Valkey: a host of our own, where each worker has a Valkey user, or ElastiCache, where all
    #: workers share one (docs/how-to/deploy-on-aws.md#valkey).
    own_valkey: bool = True
    valkey_host: str = "m6i.large"
    valkey_gib: int = 50
    #: Which of the zones the host is in, and the snapshot that its volume begins with; '': it
    #: begins empty. Another value of either makes another volume.
    valkey_zone: int = 0
    valkey_snapshot: str = ""
    #: The class of ElastiCache's hosts.
    valkey_class: str = "cache.m7g.large"
    #: True if a deletion of the stack leaves the data.
    keep_data: bool = True
    log_days: int = 90

    @property
    def removal(self) -> RemovalPolicy:
        """Returns the policy for the data. It also suits resources to which we give a name: what a
        failed first deployment left would make the next one fail."""
        return RemovalPolicy.RETAIN_ON_UPDATE_OR_DELETE if self.keep_data else RemovalPolicy.DESTROY


STAGES = (
    AwsStage(
        name="staging",
        temporal_cloud=False,
        nat_gateways=1,
        cidr="10.80.0.0/16",
        orchestrators=1,
        worker_hosts_most=4,
        pool_target=4,
        database_class="t4g.medium",
        database_gib=20,
        database_gib_most=100,
        restore_days=7,
        valkey_host="t3.small",
        valkey_gib=10,
        valkey_class="cache.t4g.small",
        standby=False,
        keep_data=False,
        log_days=14,
    ),
    AwsStage(name="production", temporal_cloud=True, cidr="10.81.0.0/16"),
)
