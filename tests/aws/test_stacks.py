"""The figures that the requirements name, in both stages."""

import json
from typing import Any

import pytest

from api.http.streams import HEARTBEAT_INTERVAL_S
from infra.jobs.scaling import WAITED_EVENT
from infra.launchers.ecs.records import GROUP
from infra.settings import Settings
from tests.support.aws_templates import Templates, listed, text_of
from worker_runtime.jobs.protocol import catalog

pytestmark = pytest.mark.timeout(600)


def test_servers_and_workers_have_a_capacity_provider_each(templates: Templates) -> None:
    kinds = {
        text_of(template["LaunchTemplateData"]["InstanceType"])
        for template in templates.resources("AWS::EC2::LaunchTemplate", ("servers",)).values()
    }
    assert kinds == {"m6i.large", "r6i.large"}
    providers = templates.resources("AWS::ECS::CapacityProvider").values()
    assert len(providers) == 2
    for settings in (provider["AutoScalingGroupProvider"] for provider in providers):
        assert settings["ManagedScaling"]["Status"] == "ENABLED"
        assert settings["ManagedDraining"] == settings["ManagedTerminationProtection"] == "ENABLED"
    warm = [
        provider["AutoScalingGroupProvider"]["ManagedScaling"]["TargetCapacity"]
        for provider in providers
    ]
    assert sorted(warm) == [90, 100]  # workers keep a margin
    assert all(
        group["NewInstancesProtectedFromScaleIn"]
        for group in templates.resources(
            "AWS::AutoScaling::AutoScalingGroup", ("servers",)
        ).values()
    )


def test_hosts_give_containers_no_credentials_and_workers_their_key(templates: Templates) -> None:
    for template in templates.resources("AWS::EC2::LaunchTemplate", ("servers",)).values():
        data = template["LaunchTemplateData"]
        assert data["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
        assert data["BlockDeviceMappings"][0]["Ebs"]["Encrypted"]
        script = text_of(data["UserData"]["Fn::Base64"])
        worker = text_of(data["InstanceType"]) == "r6i.large"
        assert ("launch-document.key" in script) is worker
        assert ("truststore.pki.rds" in script) is not worker


def test_the_api_has_its_size_and_rolls_by_itself(templates: Templates) -> None:
    api = templates.container("api")
    assert (api["Cpu"], api["MemoryReservation"], api["Memory"]) == (1024, 1536, 3072)
    assert templates.task("api")["NetworkMode"] == "bridge"
    assert api["PortMappings"] == [{"ContainerPort": 8000, "HostPort": 0, "Protocol": "tcp"}]
    # Two fill a host of 2 vCPUs: what runs next to the API reserves nothing.
    containers = templates.task("api")["ContainerDefinitions"]
    assert 2 * sum(container.get("Cpu", 0) for container in containers) == 2048


def test_every_service_rolls_at_100_to_200_per_cent_and_back_by_itself(
    templates: Templates,
) -> None:
    services = templates.resources("AWS::ECS::Service")
    assert len(services) == (8 if templates.stage != "staging" else 9)
    for name, service in services.items():
        deployment = service["DeploymentConfiguration"]
        # Two tasks of our own Temporal would not know of each other.
        shares = (0, 100) if name.startswith("TemporalService") else (100, 200)
        assert (deployment["MinimumHealthyPercent"], deployment["MaximumPercent"]) == shares, name
        assert deployment["DeploymentCircuitBreaker"] == {"Enable": True, "Rollback": True}


def test_a_deployment_leaves_the_number_of_tasks_that_are_scaled(templates: Templates) -> None:
    scaled = {
        text_of(target["ResourceId"]): (target["MinCapacity"], target["MaxCapacity"])
        for target in templates.resources("AWS::ApplicationAutoScaling::ScalableTarget").values()
    }
    assert len(scaled) == 7
    for service in templates.resources("AWS::ECS::Service"):
        count = templates.resources("AWS::ECS::Service")[service].get("DesiredCount")
        assert (count is None) is any(
            f"${{{service}.Name}}" in resource_id for resource_id in scaled
        ), service
    assert (2, 8) in scaled.values()  # the API's


def test_servers_write_only_where_they_may(templates: Templates) -> None:
    # A tmpfs has the mode of the image's folder, and belongs to root (moby#39466): of /data it
    # would be 0700.
    for task in templates.resources("AWS::ECS::TaskDefinition").values():
        for container in task["ContainerDefinitions"]:
            tmpfs = [
                mount["ContainerPath"]
                for mount in container.get("LinuxParameters", {}).get("Tmpfs", [])
            ]
            assert tmpfs in ([], ["/tmp"]), container["Name"]  # noqa: S108 - of the container
            given = {
                variable["Name"]: variable["Value"] for variable in container.get("Environment", [])
            }
            if "BERTH_MESSAGE_KEY_FILE" in given:
                assert given["BERTH_DATA_DIR"] in tmpfs, container["Name"]


def test_the_api_is_scaled_by_cpu_and_requests(templates: Templates) -> None:
    policies = templates.resources("AWS::ApplicationAutoScaling::ScalingPolicy").items()
    scaling = {}
    for name, policy in policies:
        if name.startswith("Api"):
            target = policy["TargetTrackingScalingPolicyConfiguration"]
            metric = target["PredefinedMetricSpecification"]["PredefinedMetricType"]
            scaling[metric] = (
                target["TargetValue"],
                target["ScaleOutCooldown"],
                target["ScaleInCooldown"],
            )
    assert scaling == {
        "ECSServiceAverageCPUUtilization": (70, 60, 300),
        "ALBRequestCountPerTarget": (1000, 60, 300),
    }


def test_a_leaving_api_task_drains_for_300_s(templates: Templates) -> None:
    groups = templates.resources("AWS::ElasticLoadBalancingV2::TargetGroup").values()
    group = next(candidate for candidate in groups if candidate.get("HealthCheckPath"))
    attributes = {
        attribute["Key"]: attribute["Value"] for attribute in group["TargetGroupAttributes"]
    }
    assert attributes["deregistration_delay.timeout_seconds"] == "300"
    # Whether it lives: ECS replaces tasks that fail this, and no new task heals a server that is
    # away.
    assert group["HealthCheckPath"] == "/v1/healthz"
    assert group["HealthCheckPort"] == "traffic-port"
    for listener in templates.resources("AWS::ElasticLoadBalancingV2::Listener").values():
        assert listener["Protocol"] in ("HTTPS", "TLS")
    [idle] = [
        int(attribute["Value"])
        for balancer in templates.resources("AWS::ElasticLoadBalancingV2::LoadBalancer").values()
        for attribute in balancer["LoadBalancerAttributes"]
        if attribute["Key"] == "idle_timeout.timeout_seconds"
    ]
    assert HEARTBEAT_INTERVAL_S < idle < Settings().api_keep_alive, (
        "the API must not be the first to close a connection of the balancer"
    )


def test_an_api_without_a_living_task_calls_somebody(templates: Templates) -> None:
    metrics = {
        alarm.get("MetricName") for alarm in templates.resources("AWS::CloudWatch::Alarm").values()
    }
    assert {"HTTPCode_Target_5XX_Count", "HTTPCode_ELB_5XX_Count"} <= metrics


def test_workers_have_their_limits_and_no_role(templates: Templates) -> None:
    task, worker = templates.task("worker"), templates.container("worker")
    assert (worker["Cpu"], worker["MemoryReservation"], worker["Memory"]) == (64, 384, 1024)
    assert task["NetworkMode"] == "bridge"
    for definition in (task, templates.task("worker-fargate")):
        assert "TaskRoleArn" not in definition
        container = next(
            candidate
            for candidate in definition["ContainerDefinitions"]
            if candidate["Name"] == "worker"
        )
        assert "Environment" not in container
        assert "Secrets" not in container
        assert container["ReadonlyRootFilesystem"]
        assert container["StopTimeout"] == 15
        assert container["LinuxParameters"]["Capabilities"] == {"Drop": ["ALL"]}
        assert container["LinuxParameters"]["InitProcessEnabled"]  # the image has none
        assert container["LogConfiguration"]["Options"]["mode"] == "non-blocking"


def test_tasks_on_fargate_get_the_key_before_the_worker_starts(templates: Templates) -> None:
    key = templates.container("worker-fargate", "key")
    worker = templates.container("worker-fargate", "worker")
    assert worker["DependsOn"] == [{"ContainerName": "key", "Condition": "SUCCESS"}]
    [secret] = key["Secrets"]
    assert text_of(secret["ValueFrom"]).endswith(":launch-document.key::")


def test_each_queue_of_jobs_has_a_fleet_of_its_own_that_scales_by_how_long_they_wait(
    templates: Templates,
) -> None:
    policies = templates.resources("AWS::ApplicationAutoScaling::ScalingPolicy")
    alarms = templates.resources("AWS::CloudWatch::Alarm").values()
    filters = templates.resources("AWS::Logs::MetricFilter").values()
    for queue in {kind.queue for kind in catalog.JOB_KINDS.values()}:
        given = {
            variable["Name"]: variable["Value"]
            for variable in templates.container(f"jobs-{queue}")["Environment"]
        }
        assert json.loads(given["BERTH_JOBS_QUEUES"]) == [queue]
        assert given["BERTH_JOBS_RUNNERS"] == "1-4"
        assert ("BERTH_WEBHOOK_KEY_FILE" in given) is (queue == "webhook")
        metric = f"{templates.stage}-jobs-{queue}-waited"
        [source] = [
            candidate
            for candidate in filters
            if candidate["MetricTransformations"][0]["MetricName"] == metric
        ]
        assert source["FilterPattern"] == f'{{ $.event = "{WAITED_EVENT}" }}'
        assert source["MetricTransformations"][0]["MetricValue"] == "$.seconds"
        steps = {}
        for alarm in (candidate for candidate in alarms if candidate.get("MetricName") == metric):
            [policy] = [policies[action["Ref"]] for action in alarm["AlarmActions"]]
            scaling = policy["StepScalingPolicyConfiguration"]
            assert scaling["Cooldown"] == 300
            changes = [step["ScalingAdjustment"] for step in scaling["StepAdjustments"]]
            steps[alarm["ComparisonOperator"], alarm["Threshold"]] = changes
        assert steps == {
            ("LessThanOrEqualToThreshold", 1): [-1],
            ("GreaterThanOrEqualToThreshold", 30): [1, 2],
        }


def test_task_changes_come_by_one_queue_and_dead_letters_stay_for_14_days(
    templates: Templates,
) -> None:
    rule = templates.only("AWS::Events::Rule")
    assert rule["EventPattern"]["detail-type"] == ["ECS Task State Change"]
    assert rule["EventPattern"]["detail"]["group"] == [{"prefix": GROUP}]
    queues = templates.resources("AWS::SQS::Queue")
    dead = [
        name for name, queue in queues.items() if queue["MessageRetentionPeriod"] == 14 * 86_400
    ]
    assert len(queues) == 3
    assert len(dead) == 2
    [changes] = [queue for queue in queues.values() if "RedrivePolicy" in queue]
    assert changes["RedrivePolicy"]["maxReceiveCount"] == 10
    assert changes["VisibilityTimeout"] == 60
    alarmed: dict[str, Any] = {
        text_of(dimension["Value"]): alarm
        for alarm in templates.resources("AWS::CloudWatch::Alarm").values()
        for dimension in alarm.get("Dimensions", [])
        if alarm["MetricName"] == "ApproximateNumberOfMessagesVisible"
    }
    assert {f"${{{name}.QueueName}}" for name in dead} == set(alarmed)
    assert all(alarm["Threshold"] == 0 and alarm["AlarmActions"] for alarm in alarmed.values())
    shown = text_of(templates.only("AWS::CloudWatch::Dashboard")["DashboardBody"])
    assert all(name in shown for name in dead)


def test_data_is_encrypted_restorable_and_reached_by_tls(templates: Templates) -> None:
    databases = templates.resources("AWS::RDS::DBInstance")
    assert len(databases) == (1 if templates.stage != "staging" else 2)
    for database in databases.values():
        assert database["StorageEncrypted"]
        assert database["BackupRetentionPeriod"] >= 7
        assert database["PubliclyAccessible"] is False
    for group in templates.resources("AWS::RDS::DBParameterGroup").values():
        assert group["Parameters"]["rds.force_ssl"] == "1"
    assert all(key["EnableKeyRotation"] for key in templates.resources("AWS::KMS::Key").values())
    if templates.stage != "staging":
        [database] = databases.values()
        assert database["MultiAZ"]
        assert database["DeletionProtection"]


def test_images_are_scanned_and_never_replaced(templates: Templates) -> None:
    repositories = templates.resources("AWS::ECR::Repository").values()
    assert len(repositories) == (2 if templates.stage == "elasticache" else 3)
    for repository in repositories:
        assert repository["ImageScanningConfiguration"] == {"ScanOnPush": True}
        assert repository["ImageTagMutability"] == "IMMUTABLE"


def test_every_log_ends_some_day(templates: Templates) -> None:
    groups = templates.resources("AWS::Logs::LogGroup").values()
    assert all(14 <= group["RetentionInDays"] <= 90 and group["KmsKeyId"] for group in groups)
    # Groups that a service would make itself have no end: what it writes to is there before.
    named = {group.get("LogGroupName") for group in groups}
    for part in ("base", "servers"):
        for resource in templates.template(part)["Resources"].values():
            if resource["Type"] == "AWS::RDS::DBInstance":
                place = f"/aws/rds/instance/{resource['Properties']['DBInstanceIdentifier']}"
                kinds = resource["Properties"]["EnableCloudwatchLogsExports"]
                assert {f"{place}/{kind}" for kind in kinds} <= named
                assert sum("Log" in each for each in resource["DependsOn"]) == len(kinds)


def test_no_log_holds_a_webhooks_token_or_the_values_of_a_statement(templates: Templates) -> None:
    """A webhook's token is in its path, and a load balancer's access log has each path."""
    [balancer] = [
        candidate
        for candidate in templates.template("servers")["Resources"].values()
        if candidate["Type"] == "AWS::ElasticLoadBalancingV2::LoadBalancer"
        and candidate["Properties"]["Scheme"] == "internet-facing"
    ]
    given = {
        attribute["Key"]: attribute["Value"]
        for attribute in balancer["Properties"]["LoadBalancerAttributes"]
    }
    assert given.get("access_logs.s3.enabled", "false") == "false"
    assert given["connection_logs.s3.enabled"] == "true"
    groups = templates.resources("AWS::RDS::DBParameterGroup").values()
    for parameters in (group["Parameters"] for group in groups):
        assert parameters["log_parameter_max_length"] == "0"
        assert parameters["log_parameter_max_length_on_error"] == "0"


def test_no_service_changes_before_the_database_is_migrated(templates: Templates) -> None:
    resources = templates.template("servers")["Resources"]
    services = [
        resource for resource in resources.values() if resource["Type"] == "AWS::ECS::Service"
    ]
    assert all("Prepared" in service["DependsOn"] for service in services)
    prepare = templates.container("prepare")
    assert prepare["Command"][-3:] == ["python", "-m", "infra.compose.prepare"]
    # Another revision of the task, such as one with another image, makes it run again.
    assert "TaskDefinition" in resources["Prepared"]["Properties"]


def test_our_own_temporal_reaches_what_its_start_needs_and_the_servers_wait_for_it(
    synthesised: Templates,
) -> None:
    templates = synthesised.of("staging")
    reached = {
        text_of(rule["GroupId"]).partition("Network")[2][:8]: rule["FromPort"]
        for rule in templates.resources("AWS::EC2::SecurityGroupIngress").values()
        if rule["Description"] == "Temporal"
    }
    assert reached == {"Database": 5432, "Endpoint": 443}  # endpoints: ECR, logs, secrets
    resources = templates.template("servers")["Resources"]
    services = {
        name: resource
        for name, resource in resources.items()
        if resource["Type"] == "AWS::ECS::Service"
    }
    [own] = [name for name in services if name.startswith("TemporalService")]
    assert all(own in service["DependsOn"] for name, service in services.items() if name != own)


def test_our_own_temporal_is_reached_by_its_load_balancer_alone_and_at_one_port(
    synthesised: Templates,
) -> None:
    """The membership port of its frontend asks for no login."""
    templates = synthesised.of("staging")
    groups = templates.resources("AWS::EC2::SecurityGroup")
    [own] = [name for name in groups if name.startswith("TemporalGroup")]
    [front] = [name for name in groups if name.startswith("TemporalFront")]
    assert "SecurityGroupIngress" not in groups[own]
    rules = templates.resources("AWS::EC2::SecurityGroupIngress").values()
    [rule] = [rule for rule in rules if own in text_of(rule["GroupId"])]
    assert front in text_of(rule["SourceSecurityGroupId"])
    assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 7233, 7233)


def test_the_key_serves_logs_as_cloudwatch_asks(templates: Templates) -> None:
    """docs.aws.amazon.com/AmazonCloudWatch/latest/logs/encrypt-log-data-kms.html"""
    allowed = {
        action
        for key in templates.resources("AWS::KMS::Key").values()
        for statement in key["KeyPolicy"]["Statement"]
        if any(
            "logs." in text_of(principal)
            for principal in listed(statement["Principal"].get("Service", ""))
        )
        for action in listed(statement["Action"])
    }
    assert allowed == {
        "kms:Encrypt",
        "kms:Decrypt",
        "kms:ReEncrypt*",
        "kms:GenerateDataKey*",
        "kms:DescribeKey",
    }


def test_a_first_deployment_that_failed_leaves_nothing_that_fails_the_next(
    templates: Templates,
) -> None:
    """`Retain` keeps what a rollback of a creation would remove, and its name is taken then."""
    deletion_policies = {
        (resource["Type"], resource["DeletionPolicy"])
        for part in ("base", "servers")
        for resource in templates.template(part)["Resources"].values()
        if "DeletionPolicy" in resource
    }
    assert "Retain" not in {policy for _, policy in deletion_policies}
    kept = "RetainExceptOnCreate" if templates.stage != "staging" else "Delete"
    for kind in ("AWS::Logs::LogGroup", "AWS::SecretsManager::Secret", "AWS::ECR::Repository"):
        assert (kind, kept) in deletion_policies


def test_no_password_is_in_a_template(templates: Templates) -> None:
    for name, secret in templates.resources("AWS::SecretsManager::Secret").items():
        if "SecretString" in secret:
            text = text_of(secret["SecretString"])
            without = text == "{}" or text == "rediss://${ValkeyName}:6379/0"
            assert without or "{{resolve:secretsmanager:" in text, name
