"""Valkey on a host of our own, or ElastiCache: what each stage has, and the start of the host."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from infra.aws.stages import STAGES
from infra.aws.valkey import server_config, volume_name
from infra.local.servers import ValkeyServer
from tests.support.aws_scripts import ScriptRun, text_without_references
from tests.support.aws_templates import Templates, listed, text_of

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=["staging", "production"])
def own(request: pytest.FixtureRequest, synthesised: Templates) -> Templates:
    """Returns the templates of each stage that runs a Valkey of its own."""
    return synthesised.of(request.param)


def orchestrator_environment(templates: Templates) -> dict[str, Any]:
    return {
        variable["Name"]: variable["Value"]
        for variable in templates.container("orchestrator")["Environment"]
    }


def url_of(templates: Templates, prefix: str) -> str:
    secrets = templates.resources("AWS::SecretsManager::Secret")
    [secret] = [
        candidate for name, candidate in secrets.items() if name.startswith(f"Storage{prefix}")
    ]
    return text_of(secret["SecretString"])


def launch_template(templates: Templates) -> dict[str, Any]:
    return dict(templates.only_in("AWS::EC2::LaunchTemplate", "base")["LaunchTemplateData"])


def test_each_worker_has_a_user_of_its_own_and_its_address_no_password(own: Templates) -> None:
    assert orchestrator_environment(own)["BERTH_VALKEY_USERS"] == "true"
    assert not own.resources("AWS::ElastiCache::ReplicationGroup")
    assert url_of(own, "WorkerValkeyUrl") == "rediss://${ValkeyName}:6379/0"
    assert re.fullmatch(
        r"rediss://:\{\{resolve:secretsmanager:\$\{\w+\}:SecretString:password\}\}@\$\{ValkeyName\}:6379/0",
        url_of(own, "ValkeyUrl"),
    )


def test_on_elasticache_all_workers_share_a_login_by_tls(synthesised: Templates) -> None:
    templates = synthesised.of("elasticache")
    assert orchestrator_environment(templates)["BERTH_VALKEY_USERS"] == "false"
    assert not templates.resources("AWS::EC2::Volume")
    valkey = templates.only("AWS::ElastiCache::ReplicationGroup")
    assert valkey["TransitEncryptionEnabled"]
    assert valkey["TransitEncryptionMode"] == "required"
    assert valkey["AtRestEncryptionEnabled"]
    assert valkey["NumNodeGroups"] == 1
    assert valkey["UserGroupIds"]
    assert valkey["AutomaticFailoverEnabled"]
    policy = templates.only("AWS::ElastiCache::ParameterGroup")["Properties"]["maxmemory-policy"]
    assert policy == "noeviction"
    [worker] = [
        user
        for user in templates.resources("AWS::ElastiCache::User").values()
        if user["UserName"] == "worker"
    ]
    assert "+eval" not in worker["AccessString"].split()
    assert url_of(templates, "WorkerValkeyUrl").startswith("rediss://worker:")


def test_clients_reach_it_by_tls_and_from_our_hosts_only(own: Templates) -> None:
    [listener] = own.resources("AWS::ElasticLoadBalancingV2::Listener", ("base",)).values()
    assert (listener["Port"], listener["Protocol"]) == (6379, "TLS")
    target = own.only_in("AWS::ElasticLoadBalancingV2::TargetGroup", "base")
    assert (target["Port"], target["Protocol"], target["HealthCheckProtocol"]) == (
        6379,
        "TLS",
        "TCP",
    )
    balancer = own.only_in("AWS::ElasticLoadBalancingV2::LoadBalancer", "base")
    assert balancer["Scheme"] == "internal"
    [front] = balancer["SecurityGroups"]
    ingress = own.resources("AWS::EC2::SecurityGroupIngress", ("base",)).values()
    sources = {
        text_of(rule["SourceSecurityGroupId"]).partition(".")[0].rstrip("}")[2:-8]
        for rule in ingress
        if rule["GroupId"] == front
    }
    assert sources == {"NetworkServers", "NetworkWorkers"}
    [host] = launch_template(own)["SecurityGroupIds"]
    assert [rule["SourceSecurityGroupId"] for rule in ingress if rule["GroupId"] == host] == [front]


def test_there_is_never_a_second_server_and_no_deployment_replaces_it(own: Templates) -> None:
    group = own.only_in("AWS::AutoScaling::AutoScalingGroup", "base")
    assert (group["MinSize"], group["MaxSize"]) == ("1", "1")
    assert len(group["VPCZoneIdentifier"]) == 1
    resources = own.template("base")["Resources"].values()
    [group] = [
        candidate
        for candidate in resources
        if candidate["Type"] == "AWS::AutoScaling::AutoScalingGroup"
    ]
    assert "AutoScalingRollingUpdate" not in group.get("UpdatePolicy", {})
    [volume] = [candidate for candidate in resources if candidate["Type"] == "AWS::EC2::Volume"]
    assert volume["Properties"]["Encrypted"]
    assert volume["Properties"]["MultiAttachEnabled"] is False
    kept = "Snapshot" if own.stage == "production" else "Delete"
    assert volume["DeletionPolicy"] == volume["UpdateReplacePolicy"] == kept


def test_another_zone_or_snapshot_makes_another_volume_and_a_larger_size_does_not() -> None:
    """CloudFormation refuses a change of either ("Updates are not supported"), and changes the
    size."""
    now = STAGES[1]
    changes: list[dict[str, Any]] = [
        {"valkey_zone": 1},
        {"valkey_snapshot": "snap-0a1b"},
        {"valkey_zone": 1, "valkey_snapshot": "snap-0a1b"},
    ]
    names = {volume_name(replace(now, **change)) for change in changes}
    assert len(names | {volume_name(now)}) == 4
    assert volume_name(replace(now, valkey_gib=now.valkey_gib * 2)) == volume_name(now)


def test_its_volume_is_saved_each_hour_for_two_days(own: Templates) -> None:
    details = own.only("AWS::DLM::LifecyclePolicy")["PolicyDetails"]
    tag = {"Key": "berth:valkey", "Value": own.stage}
    assert details["TargetTags"] == [tag]
    assert tag in own.only("AWS::EC2::Volume")["Tags"]
    [schedule] = details["Schedules"]
    assert schedule["CreateRule"] == {"Interval": 1, "IntervalUnit": "HOURS"}
    assert schedule["RetainRule"] == {"Count": 48}
    assert schedule["CopyTags"]  # without the tag none could be deleted


def statements(templates: Templates, role: str) -> dict[str, dict[str, Any]]:
    return {
        action: statement
        for statement in templates.statements(f"StorageValkeyHost{role}")
        for action in listed(statement["Action"])
    }


def test_the_host_may_attach_its_volume_and_read_its_password(own: Templates) -> None:
    allowed = statements(own, "Role")
    assert {action.partition(":")[0] for action in allowed} == {
        "ec2",
        "ecr",
        "kms",
        "logs",
        "secretsmanager",
    } - (set() if any(action.startswith("kms:") for action in allowed) else {"kms"})
    assert {action for action in allowed if action.startswith("ec2:")} == {"ec2:AttachVolume"}
    only_tagged = {"StringEquals": {"aws:ResourceTag/berth:valkey": own.stage}}
    assert allowed["ec2:AttachVolume"]["Condition"] == only_tagged
    assert text_of(allowed["secretsmanager:GetSecretValue"]["Resource"]).startswith(
        "${StorageValkeyHostLogin"
    )
    assert statements(own, "SnapshotsRole")["ec2:DeleteSnapshot"]["Condition"] == only_tagged


def test_a_valkey_that_is_away_calls_somebody(templates: Templates) -> None:
    alarms = templates.resources("AWS::CloudWatch::Alarm").values()
    [alarm] = [
        candidate
        for candidate in alarms
        if candidate.get("AlarmName") == f"berth-{templates.stage}-valkey"
    ]
    assert alarm["AlarmActions"]
    watched = (
        alarm["MetricName"],
        alarm["ComparisonOperator"],
        alarm["Threshold"],
        alarm["TreatMissingData"],
    )
    if templates.stage == "elasticache":
        memory = ("DatabaseMemoryUsagePercentage", "GreaterThanThreshold", 75, "notBreaching")
        assert watched == memory
    else:
        assert watched == ("HealthyHostCount", "LessThanThreshold", 1, "breaching")


# --- the start of the host

#: The first attempt to attach the volume finds it at the former host; there is no image in the
#: registry yet.
AWS = """
case "$*" in
  *attach-volume*) [ -e "$0.asked" ] && exit; touch "$0.asked"; exit 1;;
  *get-secret-value*) echo '{"username": "default", "password": "secret"}';;
  *get-login-password*) echo login;;
esac
"""
DOCKER = '[ "$1" != pull ] || [ -e "$0.asked" ] || { touch "$0.asked"; exit 1; }'
#: Answers with a token or an instance id.
CURL = 'case "$*" in *token) echo token;; *) echo i-0123;; esac'


class HostRun(ScriptRun):
    def __init__(self, folder: Path, script: str, *, has_file_system: bool) -> None:
        super().__init__(folder)
        self.volume = folder / "volume"
        self.disk = folder / "disks" / "nvme-Amazon_Elastic_Block_Store_vol0123"
        self.disk.parent.mkdir()
        self.disk.touch()
        for name in (
            "dnf",
            "sleep",
            "chown",
            "mount",
            "mkfs.xfs",
            "xfs_growfs",
            "sysctl",
            "systemctl",
            "shutdown",
        ):
            self.program(name)
        self.program("blkid", f"exit {0 if has_file_system else 2}")
        self.program("curl", CURL)
        self.program("aws", AWS)
        self.program("docker", DOCKER)
        self._script = (
            re.sub(r"^volume=.*$", "volume=vol-0123", script, flags=re.MULTILINE)
            .replace("/dev/disk/by-id/", f"{self.disk.parent}/")
            .replace("/var/lib/berth-valkey", str(self.volume))
        )
        (self.etc / "sysctl.d").mkdir()

    def start(self) -> int:
        done = self.run("bash", self._script)
        assert "command not found" not in done.stderr
        return done.returncode


def start_script(templates: Templates) -> str:
    return text_without_references(launch_template(templates)["UserData"]["Fn::Base64"])


@pytest.mark.parametrize("has_file_system", [False, True])
def test_a_new_host_takes_the_volume_and_starts_valkey(
    own: Templates, tmp_path: Path, has_file_system: bool
) -> None:
    run = HostRun(tmp_path, start_script(own), has_file_system=has_file_system)
    assert run.start() == 0
    attached = [call for call in run.calls("aws") if "attach-volume" in call]
    assert len(attached) == 2  # until the former host has ended
    assert "--volume-id vol-0123 --instance-id i-0123" in attached[0]
    # Data that are there are never formatted.
    assert run.calls("mkfs.xfs") == ([] if has_file_system else [f"mkfs.xfs {run.disk}"])
    secrets = run.etc / "berth-valkey" / "secrets"
    assert (secrets / "valkey_password.conf").read_text() == "requirepass secret\n"
    for name in ("valkey_password.conf", "valkey.key"):
        assert (secrets / name).stat().st_mode & 0o777 == 0o600
    assert "BEGIN CERTIFICATE" in (secrets / "valkey.crt").read_text()
    assert len([call for call in run.calls("docker") if call.startswith("docker pull")]) == 2
    [started] = [call for call in run.calls("docker") if call.startswith("docker run")]
    assert f"src={run.volume}/data,dst=/data" in started
    assert "--cap-drop ALL" in started
    assert "--network host" not in started  # it would reach the credentials of the host


def test_a_host_that_cannot_start_ends_itself_and_another_one_comes(
    own: Templates, tmp_path: Path
) -> None:
    run = HostRun(tmp_path, start_script(own), has_file_system=True)
    run.program("mount", "exit 1")
    assert run.start() != 0
    assert run.calls("shutdown") == ["shutdown --poweroff now"]
    assert not any(call.startswith("docker run") for call in run.calls("docker"))


async def test_a_real_valkey_takes_the_configuration_that_the_host_writes(
    synthesised: Templates, tmp_path: Path
) -> None:
    """Leaves TLS out: the Valkey of the tests was built without it."""
    run = HostRun(tmp_path, start_script(synthesised.of("production")), has_file_system=True)
    assert run.start() == 0
    folder = run.etc / "berth-valkey"
    text = (folder / "valkey.conf").read_text().replace("/run/secrets", str(folder / "secrets"))
    text = text.replace("dir /data", f"dir {run.volume}/data")
    lines = [line for line in text.splitlines() if not line.startswith("tls-")]
    socket = tmp_path / "socket"
    config = tmp_path / "without-tls.conf"
    config.write_text("\n".join([*lines, f"unixsocket {socket}"]) + "\n")
    server = await asyncio.create_subprocess_exec(ValkeyServer._binary(), config)
    try:
        async with Redis(unix_socket_path=str(socket), password="secret") as client:
            async with asyncio.timeout(20):
                while not socket.exists():
                    assert server.returncode is None
                    await asyncio.sleep(0.01)
            settings = await client.config_get("*")
        assert settings["appendfsync"] == "everysec"
        assert settings["maxmemory-policy"] == "noeviction"
        assert int(settings["maxmemory"]) > 100 * 1024**2
    finally:
        server.terminate()
        await server.wait()


def test_the_configuration_is_compose_s_with_tls_in_place_of_the_plain_port() -> None:
    lines = server_config().splitlines()
    assert "port 0" in lines
    assert "tls-port 6379" in lines
    assert "maxmemory-policy noeviction" in lines
    assert "appendfsync everysec" in lines
    assert "include /run/secrets/valkey_password.conf" in lines
