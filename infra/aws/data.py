"""Makes what lasts: the KMS keys, PostgreSQL, Valkey, the secrets, and the repositories of the
images."""

from aws_cdk import Duration, RemovalPolicy, SecretValue
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_rds as rds
from aws_cdk import aws_secretsmanager as secrets
from constructs import Construct

from infra.aws.hosts import log_group
from infra.aws.logins import password, password_of
from infra.aws.network import POSTGRES_PORT, Network
from infra.aws.stages import AwsStage
from infra.aws.valkey import ValkeyHost, add_elasticache

#: Where a host puts the authorities of RDS, and where containers see them.
RDS_AUTHORITIES = "/run/rds/authorities.pem"
#: Folders of key files, a secret each (`infra/vault/secret_folders.py`), and what is in them.
FOLDERS = {
    "private": "the orchestrators' own keys",
    "messages": "message secret",
    "api": "API secret",
    "codec": "keys of Temporal's histories",
    "fleet": "keys of the fleet's jobs, derived from the message secret",
    "webhook": "the key that signs webhooks",
    "email": "password of the mail provider",
    "messaging": "token of the provider of SMS and WhatsApp",
    "push": "key of the provider of pushes",
    "launch": "key of the launch documents; worker hosts read it, too",
    "login": "our login at Temporal",
    "temporal": "keys and logins of our own Temporal cluster",
    "admin": "the first administrator's API key",
}


def data_key(scope: Construct, stage: AwsStage) -> kms.Key:
    """Encrypts the databases' disks, images, logs and topics;
    CloudWatch's logs and alarms use it, too."""
    key = kms.Key(
        scope,
        "DataKey",
        alias=f"berth/{stage.name}/data",
        enable_key_rotation=True,
        removal_policy=stage.removal,
    )
    for service in (f"logs.{stage.region}.amazonaws.com", "cloudwatch.amazonaws.com"):
        key.grant_encrypt_decrypt(iam.ServicePrincipal(service))
        key.grant(iam.ServicePrincipal(service), "kms:DescribeKey")
    return key


class Storage(Construct):
    def __init__(
        self,
        scope: Construct,
        stage: AwsStage,
        network: Network,
        key: kms.Key,
        *,
        valkey_name: str,
        valkey_certificate: str,
    ) -> None:
        """Takes `valkey_name` and `valkey_certificate`, which are those of a Valkey of our own
        (`ValkeyHost`)."""
        super().__init__(scope, "Storage")
        self._stage = stage
        self._network = network
        self._key = key
        #: Wraps the data keys of stored credentials.
        #: The API may encrypt by it, the orchestrators decrypt.
        self.master_key = kms.Key(
            self,
            "MasterKey",
            alias=f"berth/{stage.name}/master",
            enable_key_rotation=True,
            pending_window=Duration.days(30),
            removal_policy=RemovalPolicy.RETAIN_ON_UPDATE_OR_DELETE,
        )
        self.folders = {
            name: secrets.Secret(
                self,
                f"Keys{name.title()}",
                secret_name=f"berth/{stage.name}/{name}",
                description=f"Berth, {stage.name}: {description}",
                secret_object_value={},
                removal_policy=self._stage.removal,
            )
            for name, description in FOLDERS.items()
        }
        self.database, self.database_owner_url, self.database_url = self._database()
        #: The repositories of the images that are built here, and of Valkey's.
        self.images = {name: self._repository(name) for name in ("server", "worker")}
        if stage.own_valkey:
            self.images["valkey"] = self._repository("valkey")
            host = ValkeyHost(
                self,
                stage,
                network,
                key,
                self.images["valkey"],
                name=valkey_name,
                certificate=valkey_certificate,
            )
            self.valkey = host.parts
        else:
            self.valkey = add_elasticache(self, stage, network, key)
        self.valkey_url = self._url("ValkeyUrl", self.valkey.url)
        self.worker_valkey_url = self._url("WorkerValkeyUrl", self.valkey.worker_url)
        # Where each worker has a user of its own,
        # fleets have, too: both addresses are without a login.
        self.jobs_valkey_url = (
            self.worker_valkey_url
            if self.valkey.has_users
            else self._url("JobsValkeyUrl", self.valkey.jobs_url)
        )

    def _database(self) -> tuple[rds.DatabaseInstance, secrets.Secret, secrets.Secret]:
        """Creates the database and two addresses: of the role that owns the tables, for `prepare`,
        and of the servers' role, which `prepare` makes."""
        owner = self._password("DatabaseOwnerLogin", "berth_owner")
        servers = self._password("DatabaseLogin", "berth")
        database = postgres(self, "Database", self._stage, self._network, self._key, owner, "berth")
        host = database.db_instance_endpoint_address
        address = f"{host}:{POSTGRES_PORT}/berth?sslrootcert={RDS_AUTHORITIES}"
        owners_url = f"postgresql+asyncpg://berth_owner:{password_of(owner)}@{address}"
        servers_url = f"postgresql+asyncpg://berth:{password_of(servers)}@{address}"
        return (
            database,
            self._url("DatabaseOwnerUrl", owners_url),
            self._url("DatabaseUrl", servers_url),
        )

    def _repository(self, name: str) -> ecr.Repository:
        repository = ecr.Repository(
            self,
            f"Image{name.title()}",
            repository_name=f"berth-{self._stage.name}/{name}",
            image_scan_on_push=True,
            image_tag_mutability=ecr.TagMutability.IMMUTABLE,
            encryption=ecr.RepositoryEncryption.KMS,
            encryption_key=self._key,
            removal_policy=self._stage.removal,
        )
        repository.add_lifecycle_rule(max_image_count=30, description="the last 30 releases")
        return repository

    def _password(self, name: str, user: str) -> secrets.Secret:
        return password(self, name, user, self._stage.removal)

    def _url(self, name: str, url: str) -> secrets.Secret:
        """Creates a secret that CloudFormation composes when it deploys: no template holds the
        password."""
        return secrets.Secret(
            self,
            name,
            secret_string_value=SecretValue.unsafe_plain_text(url),
            removal_policy=self._stage.removal,
        )


def postgres(
    scope: Construct,
    name: str,
    stage: AwsStage,
    network: Network,
    key: kms.IKey,
    login: secrets.Secret,
    database: str,
) -> rds.DatabaseInstance:
    """Creates PostgreSQL in the isolated subnets, restorable to any second of the last days, by TLS
    only.

    RDS would make the groups of its logs itself,
    and keep what is in them for ever. So they are made before.
    """
    identifier = f"berth-{stage.name}" + ("" if database == "berth" else "-temporal")
    kinds = ["postgresql", "upgrade"]
    groups = [
        log_group(
            scope, f"{name}{kind.title()}Log", stage, key, f"/aws/rds/instance/{identifier}/{kind}"
        )
        for kind in kinds
    ]
    parameters = rds.ParameterGroup(
        scope,
        f"{name}Parameters",
        engine=rds.DatabaseInstanceEngine.postgres(
            version=rds.PostgresEngineVersion.of("18.6", "18")
        ),
        parameters={
            "rds.force_ssl": "1",
            "log_min_duration_statement": "500",
            # No log shows the values of a statement:
            # they are orders, addresses and sealed credentials.
            "log_parameter_max_length": "0",
            "log_parameter_max_length_on_error": "0",
        },
    )
    made = rds.DatabaseInstance(
        scope,
        name,
        instance_identifier=identifier,
        engine=rds.DatabaseInstanceEngine.postgres(
            version=rds.PostgresEngineVersion.of("18.6", "18")
        ),
        instance_type=ec2.InstanceType(stage.database_class),
        vpc=network.vpc,
        vpc_subnets=network.data,
        security_groups=[network.database],
        credentials=rds.Credentials.from_secret(login),
        database_name=database,
        parameter_group=parameters,
        multi_az=stage.standby,
        allocated_storage=stage.database_gib,
        max_allocated_storage=stage.database_gib_most,
        storage_type=rds.StorageType.GP3,
        storage_encrypted=True,
        storage_encryption_key=key,
        backup_retention=Duration.days(stage.restore_days),
        copy_tags_to_snapshot=True,
        deletion_protection=stage.keep_data,
        removal_policy=RemovalPolicy.SNAPSHOT if stage.keep_data else RemovalPolicy.DESTROY,
        cloudwatch_logs_exports=kinds,
        enable_performance_insights=True,
        performance_insight_encryption_key=key,
        monitoring_interval=Duration.seconds(60),
        auto_minor_version_upgrade=False,
        iam_authentication=False,
    )
    made.node.add_dependency(*groups)
    return made
