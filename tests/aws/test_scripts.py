"""The scripts in the templates, run by a real shell: the hosts' start, and our own Temporal."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from infra.local.servers import TemporalServer
from tests.support.aws_scripts import ScriptRun, text_without_references
from tests.support.aws_templates import Resource, Templates
from workflows.names import SEARCH_ATTRIBUTES

pytestmark = pytest.mark.timeout(600)


#: Writes what it was asked for; the first answer of Secrets Manager is that there is no key yet.
CURL = 'while [ "$1" != --output ]; do shift; done; echo authorities > "$2"'
AWS = (
    '[ -e "$0.asked" ] && echo \'{"launch-document.key": "secret"}\' && exit; touch '
    "\"$0.asked\"; echo '{}'"
)


def host_run(folder: Path) -> ScriptRun:
    run = ScriptRun(folder)
    for name in ("dnf", "systemctl", "chown", "sleep"):
        run.program(name)
    run.program("curl", CURL)
    run.program("aws", AWS)
    return run


def host_scripts(templates: Templates) -> dict[str, str]:
    """Returns the start script of each kind of host of the cluster."""
    launch_templates = templates.resources("AWS::EC2::LaunchTemplate", ("servers",)).values()
    template_data = (template["LaunchTemplateData"] for template in launch_templates)
    return {
        data["InstanceType"]: text_without_references(data["UserData"]["Fn::Base64"])
        for data in template_data
    }


def test_a_host_has_all_it_needs_before_it_joins_the_cluster(
    templates: Templates, tmp_path: Path
) -> None:
    for kind, script in host_scripts(templates).items():
        run = host_run(tmp_path / kind)
        done = run.run("bash", script)
        assert done.returncode == 0, done.stderr
        config = (run.etc / "ecs" / "ecs.config").read_text().splitlines()
        assert "ECS_CLUSTER=reference" in config
        # As the Docker launcher's.
        assert ("ECS_TASK_PIDS_LIMIT=256" in config) is (kind == "r6i.large")
        # ECS's agent and Docker wait for the end of this script: who starts one of them here waits
        # for ever.
        assert run.calls("systemctl") == ["systemctl daemon-reload"]
        section, rule = (
            (run.etc / "systemd/system/ecs.service.d/no-metadata.conf").read_text().splitlines()
        )
        assert section == "[Service]"
        assert rule.startswith("ExecStartPre=/usr/sbin/iptables --wait --insert DOCKER-USER ")
        assert rule.endswith(" --destination 169.254.169.254/32 --jump DROP")
        if kind == "r6i.large":
            key = run.etc / "berth" / "launch-document.key"
            assert (key.read_text(), key.stat().st_mode & 0o777) == ("secret", 0o600)
            assert len(run.calls("sleep")) == 1  # `prepare` had not made the key yet
        else:
            assert (run.etc / "berth-rds" / "authorities.pem").read_text() == "authorities\n"


def test_a_host_that_lacks_something_joins_no_cluster(templates: Templates, tmp_path: Path) -> None:
    for kind, script in host_scripts(templates).items():
        run = host_run(tmp_path / kind)
        for name in ("dnf", "curl"):
            run.program(name, "exit 1")
        assert run.run("bash", script).returncode != 0
        assert not (run.etc / "ecs" / "ecs.config").exists()


def test_a_deployment_replaces_no_host_on_which_users_trade(templates: Templates) -> None:
    groups = {
        name: group
        for name, group in templates.template("servers")["Resources"].items()
        if group["Type"] == "AWS::AutoScaling::AutoScalingGroup"
    }
    rolled = {
        name
        for name, group in groups.items()
        if "AutoScalingRollingUpdate" in group["UpdatePolicy"]
    }
    assert {name.startswith("HostsServers") for name in rolled} == {True}
    assert {name.startswith("HostsWorkers") for name in groups.keys() - rolled} == {True}
    # The orchestrators set the number of hosts: a deployment leaves it.
    for group in groups.values():
        assert group["UpdatePolicy"]["AutoScalingScheduledAction"] == {
            "IgnoreUnmodifiedGroupSizeProperties": True
        }


# --- our own Temporal, in the stage that has one


def given(container: Resource) -> dict[str, str]:
    return {
        **{
            variable["Name"]: text_without_references(variable["Value"])
            for variable in container.get("Environment", [])
        },
        **{secret["Name"]: "secret" for secret in container.get("Secrets", [])},
    }


def script_of(container: Resource) -> str:
    assert container["EntryPoint"] == ["/bin/sh", "-c"]
    [script] = container["Command"]
    return text_without_references(script)


def test_the_namespace_is_made_and_made_again(
    synthesised: Templates, temporal_server: TemporalServer, tmp_path: Path
) -> None:
    container = synthesised.of("staging").container("temporal", "namespace")
    run = ScriptRun(tmp_path)
    (run.programs / "temporal").symlink_to(TemporalServer.binary())
    login = tmp_path / "admin.jwt"
    login.write_text("login")
    environment = given(container) | {
        "TEMPORAL_ADDRESS": temporal_server.address,
        "TEMPORAL_API_KEY_FILE": str(login),
        "TEMPORAL_NAMESPACE": f"aws-{os.getpid()}",
        "HOME": str(tmp_path),
    }
    for _ in range(2):
        done = run.run("sh", script_of(container), **environment)
        assert done.returncode == 0, done.stderr
    place = f"--address {temporal_server.address} --namespace {environment['TEMPORAL_NAMESPACE']}"
    asked = f"{place} --output json"
    described = run.run("sh", f"temporal operator namespace describe {asked}", HOME=str(tmp_path))
    assert (
        json.loads(described.stdout)["config"]["workflowExecutionRetentionTtl"] == f"{14 * 86_400}s"
    )
    attributes = run.run(
        "sh", f"temporal operator search-attribute list {asked}", HOME=str(tmp_path)
    )
    assert all(name in attributes.stdout for name in SEARCH_ATTRIBUTES)


def test_both_schemas_are_made_by_tls(synthesised: Templates, tmp_path: Path) -> None:
    container = synthesised.of("staging").container("temporal", "schema")
    run = ScriptRun(tmp_path)
    run.program("temporal-sql-tool", '[ "$SQL_PASSWORD" = secret ]')
    done = run.run("sh", script_of(container), **given(container))
    assert done.returncode == 0, done.stderr
    calls = run.calls("temporal-sql-tool")
    assert len(calls) == 6
    assert all("--ep reference --port 5432 --tls --tls-ca-file" in call for call in calls)


def test_the_server_reads_its_password_and_reaches_its_database_by_tls(
    synthesised: Templates,
) -> None:
    templates = synthesised.of("staging")
    text = given(templates.container("temporal", "config"))["SERVER"]
    config = yaml.safe_load(re.sub(r"\{\{.*?\}\}", "", text))
    for store in config["persistence"]["datastores"].values():
        sql = store["sql"]
        assert sql["connectAddr"] == "reference:5432"
        assert sql["tls"]["enabled"]
        assert sql["tls"]["enableHostVerification"]
        assert sql["passwordCommand"] == {"command": "printenv", "args": ["SQL_PASSWORD"]}
    assert "SQL_PASSWORD" in given(templates.container("temporal", "temporal"))
    sources = config["global"]["authorization"]["jwtKeyProvider"]["keySourceURIs"]
    assert sources[0] == "http://127.0.0.1:8000/jwks.json"
