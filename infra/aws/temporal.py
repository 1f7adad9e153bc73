"""The way to Temporal: Temporal Cloud,
or a cluster of our own on Fargate behind a load balancer with TLS.

Our own is what compose runs (`infra/compose/temporal-*`): all services in one process, PostgreSQL,
an authorizer that wants JWTs. Its configuration is that of compose, with AWS's addresses in it.
"""

from pathlib import Path
from typing import Any

from aws_cdk import Duration
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_elasticloadbalancingv2 as elb
from aws_cdk import aws_iam as iam
from aws_cdk import aws_route53 as route53
from aws_cdk import aws_route53_targets as route53_targets
from aws_cdk import aws_s3 as s3
from constructs import Construct

from infra.aws.data import postgres
from infra.aws.hosts import log_group
from infra.aws.logins import password
from infra.aws.network import POSTGRES_PORT, TEMPORAL_PORT, Network
from infra.aws.servers import Servers
from infra.aws.tasks import environment, image_of

VERSION = "1.31.2"
#: MiB and CPU units of the whole task.
CPU_UNITS, MEMORY_MIB = 1024, 4096
_COMPOSE = Path(__file__).parents[1] / "compose"
_CONFIG, _AUTHORITIES = "/etc/temporal/berth", "/etc/temporal/berth/authorities.pem"


def cloud_settings(address: str, namespace: str) -> dict[str, Any]:
    return {
        "temporal_address": address,
        "temporal_namespace": namespace,
        "temporal_tls": True,
        "temporal_api_key_file": "/keys/login/temporal.key",
    }


def own_settings(name: str) -> dict[str, Any]:
    return {
        "temporal_address": f"{name}:443",
        "temporal_namespace": "default",
        "temporal_tls": True,
        "temporal_api_key_file": "/keys/login/temporal.jwt",
    }


def server_config(database: str) -> str:
    """Returns compose's configuration, with this address of PostgreSQL, TLS to it, and the key set
    next to the server."""
    text = (_COMPOSE / "temporal-server.yaml").read_text("utf-8")
    tls = f'tls: {{enabled: true, caFile: "{_AUTHORITIES}", enableHostVerification: true}}'
    for old, new, times in [
        (
            'connectAddr: "postgres:5432"',
            f'connectAddr: "{database}:{POSTGRES_PORT}"\n        {tls}',
            2,
        ),
        ('command: cat\n          args: ["/run/secrets/temporal_database_password"]',
         'command: printenv\n          args: ["SQL_PASSWORD"]', 2),
        ("http://temporal-jwks:8000/", "http://127.0.0.1:8000/", 1),
    ]:  # fmt: skip
        if text.count(old) != times:
            raise ValueError(
                f"temporal-server.yaml has changed: {old!r} is not there {times} times"
            )
        text = text.replace(old, new)
    return text


def schema_script(database: str) -> str:
    """Returns compose's script, by TLS."""
    text = (_COMPOSE / "temporal-schema.sh").read_text("utf-8")
    tls = f"--tls --tls-ca-file {_AUTHORITIES} --tls-server-name {database}"
    text = text.replace(
        'SQL_PASSWORD="$(cat /run/secrets/temporal_database_password)"\nexport SQL_PASSWORD\n', ""
    )
    return text.replace(
        "--ep postgres --port 5432", f"--ep {database} --port {POSTGRES_PORT} {tls}"
    )


class TemporalCluster(Construct):
    """Needs the keys that `prepare` makes; the API and the orchestrators need it."""

    def __init__(
        self,
        servers: Servers,
        network: Network,
        access_logs: s3.IBucket,
        *,
        name: str,
        certificate: str,
    ) -> None:
        """Takes `name`, which the certificate covers; a private zone leads it to the load
        balancer."""
        super().__init__(servers.scope, "Temporal")
        stage, storage, key = servers.stage, servers.storage, servers.key
        login = password(self, "DatabaseLogin", "temporal", stage.removal)
        database = postgres(self, "Database", stage, network, key, login, "postgres_unused")
        address = database.db_instance_endpoint_address

        group = ec2.SecurityGroup(self, "Group", vpc=network.vpc, description="Berth: Temporal")
        front = ec2.SecurityGroup(
            self, "Front", vpc=network.vpc, description="Berth: way to Temporal"
        )
        front.add_ingress_rule(network.servers, ec2.Port.tcp(443), "servers")
        # Nothing else comes in: the frontend's membership port asks for no login. The server's
        # parts are in one container, where they find each other on loopback. So there is one task
        # at a time: a second one would not know of the first, and both would own all shards.
        group.add_ingress_rule(front, ec2.Port.tcp(TEMPORAL_PORT), "calls")
        # Its image, keys and log come by the endpoints: their names lead nowhere else in this VPC.
        for to, reached, port in (
            ("Database", network.database, POSTGRES_PORT),
            ("Endpoints", network.endpoints, 443),
        ):
            ec2.CfnSecurityGroupIngress(  # here: these groups are of the other stack
                self,
                f"To{to}",
                group_id=reached.security_group_id,
                source_security_group_id=group.security_group_id,
                ip_protocol="tcp",
                from_port=port,
                to_port=port,
                description="Temporal",
            )

        role = iam.Role(
            self,
            "Role",
            assumed_by=iam.ServicePrincipal("ecs-tasks.amazonaws.com"),
            description=f"Berth, {stage.name}: what our Temporal may do",
        )
        storage.folders["temporal"].grant_read(role)
        self._task = ecs.FargateTaskDefinition(
            self,
            "Task",
            family=f"berth-{stage.name}-temporal",
            cpu=CPU_UNITS,
            memory_limit_mib=MEMORY_MIB,
            task_role=role,
            volumes=[ecs.Volume(name=volume) for volume in ("config", "keys")],
        )
        self._logging = ecs.LogDriver.aws_logs(
            stream_prefix="temporal", log_group=log_group(self, "temporal", stage, key)
        )
        ours = image_of(storage.images["server"], servers.image_tag)
        tools = ecs.ContainerImage.from_registry(f"temporalio/admin-tools:{VERSION}")
        secret = {"SQL_PASSWORD": ecs.Secret.from_secrets_manager(login, "password")}
        bundle = (
            f"https://truststore.pki.rds.amazonaws.com/{stage.region}/{stage.region}-bundle.pem"
        )
        config = self._container(
            "config",
            ours,
            command=[
                "python",
                "-c",
                "import os, pathlib, urllib.request as r; f = pathlib.Path('/config'); "
                "(f / 'server.yaml').write_text(os.environ['SERVER']); "
                "(f / 'dynamic.yaml').write_text(os.environ['DYNAMIC']); "
                f"(f / 'authorities.pem').write_bytes(r.urlopen('{bundle}', timeout=30).read())",
            ],
            given={
                "SERVER": server_config(address),
                "DYNAMIC": (_COMPOSE / "temporal-dynamic.yaml").read_text("utf-8"),
            },
            mounts={"config": "/config"},
            user="0",
            once=True,
        )
        keys = self._container(
            "keys",
            ours,
            command=["python", "-m", "infra.vault.secret_folders", "follow"],
            given=environment(
                {"secret_folders": {"/keys/temporal": storage.folders["temporal"].secret_arn}}
            ),
            mounts={"keys": "/keys"},
            user="0",
            health=["test", "-e", "/keys/temporal/public/jwks.json"],
        )
        jwks = self._container(
            "jwks",
            ours,
            command=[
                "python",
                "-m",
                "http.server",
                "--bind",
                "127.0.0.1",
                "--directory",
                "/keys/temporal/public",
                "8000",
            ],
            mounts={"keys": "/keys"},
            user="0",
            health=[
                "python",
                "-m",
                "infra.compose.health",
                "http",
                "http://127.0.0.1:8000/jwks.json",
            ],
            after={keys: ecs.ContainerDependencyCondition.HEALTHY},
        )
        schema = self._container(
            "schema",
            tools,
            script=schema_script(address),
            secrets=secret,
            mounts={"config": _CONFIG},
            once=True,
            after={config: ecs.ContainerDependencyCondition.SUCCESS},
        )
        server = self._container(
            "temporal",
            ecs.ContainerImage.from_registry(f"temporalio/server:{VERSION}"),
            given={
                "TEMPORAL_SERVER_CONFIG_FILE_PATH": f"{_CONFIG}/server.yaml",
                "TEMPORAL_SERVICES": "frontend,internal-frontend,history,matching,worker",
                "BIND_ON_IP": "0.0.0.0",  # noqa: S104 - of its own network interface
            },
            secrets=secret,
            mounts={"config": _CONFIG},
            health=["nc", "-z", "127.0.0.1", str(TEMPORAL_PORT)],
            after={
                schema: ecs.ContainerDependencyCondition.SUCCESS,
                jwks: ecs.ContainerDependencyCondition.HEALTHY,
            },
        )
        server.add_port_mappings(ecs.PortMapping(container_port=TEMPORAL_PORT))
        self._container(
            "namespace",
            tools,
            script=(_COMPOSE / "temporal-namespace.sh").read_text("utf-8"),
            given={
                "TEMPORAL_ADDRESS": f"127.0.0.1:{TEMPORAL_PORT}",
                "TEMPORAL_NAMESPACE": "default",
                "TEMPORAL_RETENTION": f"{stage.log_days}d",
                "TEMPORAL_API_KEY_FILE": "/keys/temporal/admin.jwt",
                "HOME": "/tmp",
            },
            mounts={"keys": "/keys"},
            user="0",
            once=True,
            after={server: ecs.ContainerDependencyCondition.HEALTHY},
        )
        self.service = ecs.FargateService(
            self,
            "Service",
            service_name="temporal",
            cluster=servers.hosts.services_cluster,
            task_definition=self._task,
            desired_count=1,
            min_healthy_percent=0,
            max_healthy_percent=100,
            circuit_breaker=ecs.DeploymentCircuitBreaker(enable=True, rollback=True),
            vpc_subnets=network.hosts,
            security_groups=[group],
            health_check_grace_period=Duration.seconds(180),
        )
        balancer = elb.NetworkLoadBalancer(
            self,
            "Balancer",
            vpc=network.vpc,
            internet_facing=False,
            vpc_subnets=network.hosts,
            security_groups=[front],
            cross_zone_enabled=True,
        )
        balancer.log_access_logs(access_logs, "temporal")
        balancer.add_listener(
            "Tls",
            port=443,
            protocol=elb.Protocol.TLS,
            alpn_policy=elb.AlpnPolicy.HTTP2_ONLY,
            certificates=[elb.ListenerCertificate.from_arn(certificate)],
            ssl_policy=elb.SslPolicy.TLS13_RES,
        ).add_targets(
            "Frontend",
            port=TEMPORAL_PORT,
            protocol=elb.Protocol.TCP,
            targets=[
                self.service.load_balancer_target(
                    container_name="temporal", container_port=TEMPORAL_PORT
                )
            ],
            deregistration_delay=Duration.seconds(60),
        )
        zone = route53.PrivateHostedZone(self, "Zone", zone_name=name, vpc=network.vpc)
        route53.ARecord(
            self,
            "Name",
            zone=zone,
            target=route53.RecordTarget.from_alias(route53_targets.LoadBalancerTarget(balancer)),
        )

    def _container(
        self,
        name: str,
        image: ecs.ContainerImage,
        *,
        command: list[str] | None = None,
        script: str = "",
        given: dict[str, str] | None = None,
        secrets: dict[str, ecs.Secret] | None = None,
        mounts: dict[str, str],
        user: str | None = None,
        health: list[str] | None = None,
        once: bool = False,
        after: dict[ecs.ContainerDefinition, ecs.ContainerDependencyCondition] | None = None,
    ) -> ecs.ContainerDefinition:
        made = self._task.add_container(
            name.title(),
            container_name=name,
            image=image,
            entry_point=["/bin/sh", "-c"] if script else None,
            command=[script] if script else command,
            environment=given,
            secrets=secrets,
            user=user,
            essential=not once,
            logging=self._logging,
            health_check=health
            and ecs.HealthCheck(
                command=["CMD", *health],
                interval=Duration.seconds(10),
                timeout=Duration.seconds(8),
                retries=6,
                start_period=Duration.seconds(120),
            ),
        )
        made.add_mount_points(
            *(
                ecs.MountPoint(source_volume=v, container_path=p, read_only=False)
                for v, p in mounts.items()
            )
        )
        made.add_container_dependencies(
            *(
                ecs.ContainerDependency(container=container, condition=condition)
                for container, condition in (after or {}).items()
            )
        )
        return made
