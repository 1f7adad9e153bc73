"""The table of costs is what its script computes, and follows the number of users."""

import json
from pathlib import Path

import pytest

from infra.aws.costs import (
    ALARM_COUNT,
    FOLDER_COUNT,
    FOLDER_COUNT_PER_API_TASK,
    KEY_COUNT,
    METRIC_COUNT,
    SECRET_COUNT,
    USER_COUNTS,
    VALKEY_VOLUME_GIB,
    CostLoad,
    costs,
    table,
)
from tests.support.aws_templates import Templates, text_of

pytestmark = pytest.mark.timeout(600)
HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "deploy-on-aws.md"


def test_the_table_in_the_documents_is_the_script_s() -> None:
    assert table() in HOW_TO.read_text(encoding="utf-8")


def test_what_is_counted_is_there(synthesised: Templates) -> None:
    production = synthesised.of("production")
    kinds = ("AWS::SecretsManager::Secret", "AWS::KMS::Key", "AWS::CloudWatch::Alarm")
    assert tuple(len(production.resources(kind)) for kind in kinds) == (
        SECRET_COUNT,
        KEY_COUNT,
        ALARM_COUNT,
    )
    assert production.only("AWS::EC2::Volume")["Size"] == VALKEY_VOLUME_GIB
    filters = production.resources("AWS::Logs::MetricFilter").values()
    transformations = [metric_filter["MetricTransformations"][0] for metric_filter in filters]
    assert len({transformation["MetricName"] for transformation in transformations}) == METRIC_COUNT


def test_reads_of_secrets_are_counted(synthesised: Templates) -> None:
    followed = {
        task["Family"].removeprefix("berth-production-"): len(
            json.loads(text_of(variable["Value"]))
        )
        for task in synthesised.of("production").resources("AWS::ECS::TaskDefinition").values()
        for container in task["ContainerDefinitions"]
        for variable in container.get("Environment", [])
        if variable["Name"] == "BERTH_SECRET_FOLDERS"
    }
    followed.pop("prepare")  # once
    assert followed.pop("api") == FOLDER_COUNT_PER_API_TASK
    followed["orchestrator"] *= 2
    assert sum(followed.values()) == FOLDER_COUNT


def test_more_users_cost_more_and_each_of_them_less() -> None:
    sums = [sum(costs(CostLoad(users=users)).values()) for users in USER_COUNTS]
    assert sums == sorted(sums)
    each = [total / users for total, users in zip(sums, USER_COUNTS, strict=True)]
    assert each == sorted(each, reverse=True)


def test_workers_hosts_are_planned_as_the_orchestrator_does() -> None:
    quiet = costs(CostLoad(users=300, busy=0.1))["worker hosts"]
    busy = costs(CostLoad(users=300, busy=1.0))["worker hosts"]
    # 30 workers a host, and one warm host.
    assert busy / quiet > 2
