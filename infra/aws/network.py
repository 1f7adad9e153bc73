"""VPC, its security groups, and the way out: brokers see the fixed addresses of NAT gateways."""

from aws_cdk import RemovalPolicy
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.aws.stages import AwsStage

#: Ports that Docker gives to containers in bridge mode.
BRIDGE_PORTS = ec2.Port.tcp_range(32768, 65535)
POSTGRES_PORT, VALKEY_PORT, TEMPORAL_PORT = 5432, 6379, 7233
#: Services that the hosts and tasks call often; without an endpoint each call would pay for NAT.
_ENDPOINTS = {
    "Ecr": ec2.InterfaceVpcEndpointAwsService.ECR,
    "EcrDocker": ec2.InterfaceVpcEndpointAwsService.ECR_DOCKER,
    "Logs": ec2.InterfaceVpcEndpointAwsService.CLOUDWATCH_LOGS,
    "Secrets": ec2.InterfaceVpcEndpointAwsService.SECRETS_MANAGER,
    "Kms": ec2.InterfaceVpcEndpointAwsService.KMS,
}


class Network(Construct):
    """Public: the load balancer and NAT. Private with a way out: hosts. Isolated: the databases."""

    def __init__(self, scope: Construct, stage: AwsStage, key: kms.IKey) -> None:
        super().__init__(scope, "Network")
        flows = logs.LogGroup(
            self,
            "Flows",
            encryption_key=key,
            retention=logs.RetentionDays.TWO_WEEKS,
            removal_policy=RemovalPolicy.DESTROY,
        )
        self.vpc = ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(stage.cidr),
            max_azs=stage.zones,
            nat_gateways=stage.nat_gateways,
            restrict_default_security_group=False,
            subnet_configuration=[
                ec2.SubnetConfiguration(
                    name="public", subnet_type=ec2.SubnetType.PUBLIC, cidr_mask=24
                ),
                ec2.SubnetConfiguration(
                    name="hosts", subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS, cidr_mask=20
                ),
                ec2.SubnetConfiguration(
                    name="data", subnet_type=ec2.SubnetType.PRIVATE_ISOLATED, cidr_mask=24
                ),
            ],
            gateway_endpoints={
                "S3": ec2.GatewayVpcEndpointOptions(service=ec2.GatewayVpcEndpointAwsService.S3)
            },
            flow_logs={
                "Rejected": ec2.FlowLogOptions(
                    destination=ec2.FlowLogDestination.to_cloud_watch_logs(flows),
                    traffic_type=ec2.FlowLogTrafficType.REJECT,
                )
            },
        )
        self.balancer = self._group("Balancer", "load balancer of the API", outbound=False)
        self.servers = self._group("Servers", "hosts of API, orchestrators and job runners")
        self.workers = self._group("Workers", "hosts of user workers")
        self.database = self._group("Database", "PostgreSQL", outbound=False)
        self.valkey = self._group("Valkey", "Valkey", outbound=False)
        self.endpoints = self._group("Endpoints", "endpoints of AWS services", outbound=False)

        self.balancer.add_ingress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "clients")
        self.balancer.add_egress_rule(self.servers, BRIDGE_PORTS, "API tasks")
        self.servers.add_ingress_rule(self.balancer, BRIDGE_PORTS, "API tasks")
        self.database.add_ingress_rule(self.servers, ec2.Port.tcp(POSTGRES_PORT), "servers")
        for group in (self.servers, self.workers):
            self.valkey.add_ingress_rule(group, ec2.Port.tcp(VALKEY_PORT), "servers and workers")
            self.endpoints.add_ingress_rule(group, ec2.Port.tcp(443), "servers and workers")
        for name, service in _ENDPOINTS.items():
            self.vpc.add_interface_endpoint(
                name,
                service=service,
                security_groups=[self.endpoints],
                open=False,
                subnets=self.hosts,
            )

    @property
    def hosts(self) -> ec2.SubnetSelection:
        return ec2.SubnetSelection(subnet_group_name="hosts")

    @property
    def data(self) -> ec2.SubnetSelection:
        return ec2.SubnetSelection(subnet_group_name="data")

    def _group(self, name: str, description: str, *, outbound: bool = True) -> ec2.SecurityGroup:
        """Creates a security group. Workers and servers may call out, to brokers and AWS; nobody
        calls a worker."""
        return ec2.SecurityGroup(
            self,
            name,
            vpc=self.vpc,
            description=f"Berth: {description}",
            allow_all_outbound=outbound,
        )
